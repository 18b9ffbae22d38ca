"""The wheel: its content, its metadata, and that an empty environment with only torch can import it."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import headwise

ROOT = Path(__file__).parent.parent


def built(part, folder):
    """Return the wheel of the distribution in a folder of the repository."""
    # A copy: a build leaves its folder behind, and files from an earlier build would get into the wheel.
    tree = folder / "tree"
    shutil.copytree(ROOT / part / "src", tree / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        if (ROOT / part / name).exists():
            shutil.copy(ROOT / part / name, tree)
    # The build's own environment would be downloaded: setuptools is in this one.
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    done = subprocess.run([*command, folder, tree], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl")
    return zipfile.ZipFile(made)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built(".", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def verdict(tmp_path_factory):
    return built("verdict", tmp_path_factory.mktemp("verdict"))


@pytest.fixture(scope="module")
def papers(tmp_path_factory):
    return built("papers", tmp_path_factory.mktemp("papers"))


def test_wheels_can_be_installed_in_any_order(wheel, verdict, papers, tmp_path):
    """No file is in two of them, so that none overwrites what another left; without libraries the command names one."""
    held = [name for one in (wheel, verdict, papers) for name in one.namelist()]
    assert len(held) == len({*held})
    assert "headwise_papers/league/small_worlds/deep_digits.toml" in held
    found = []
    for order in ((papers, wheel, verdict), (verdict, wheel, papers)):
        site = tmp_path / str(len(found))
        for one in order:
            one.extractall(site)
        found.append({str(path.relative_to(site)): path.read_bytes() for path in site.rglob("*") if path.is_file()})
        # -S and -I: neither the libraries of this environment nor its own headwise
        code = f"import sys; sys.path.insert(0, {str(site)!r}); sys.argv = ['headwise', 'compare']\nimport runpy\n"
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", f"{code}runpy.run_module('headwise', run_name='__main__')"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1 and not done.stdout
        assert "pip install 'headwise[study]'" in done.stderr, done.stderr
    assert found[0] == found[1]


def test_the_wheels_hold_their_data_and_no_tests(wheel, verdict):
    names = wheel.namelist()
    assert {"headwise/py.typed", "headwise/lab/studies/catalogue.json"} < {*names}
    # the shipped schemas, which docs/exit_codes.md lists
    assert {"headwise/health/auditing/audit.schema.json", "headwise/health/auditing/alarms.schema.json"} < {*names}
    assert all(name.startswith(("headwise/", "headwise-")) for name in names)
    pages = verdict.namelist()
    assert {"py.typed", "pages/shell.css", "pages/page.html", "judging/judge.schema.json"} <= {
        name.removeprefix("headwise_verdict/") for name in pages
    }
    assert all(name.startswith(("headwise_verdict/", "headwise_verdict-")) for name in pages)


@pytest.mark.parametrize("part", [".", "verdict", "papers"])
def test_commands_and_entry_points_exist(part):
    project = tomllib.loads((ROOT / part / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    found = [EntryPoint(name, place, group) for group, named in groups.items() for name, place in named.items()]
    # load raises where a module or a name in it is missing
    assert found and None not in [one.load() for one in found]


def test_all_distributions_have_one_version(verdict):
    (name,) = [name for name in verdict.namelist() if name.endswith("METADATA")]
    assert Parser().parsestr(verdict.read(name).decode())["Version"] == headwise.__version__
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert f"headwise-verdict=={headwise.__version__}" in extras["study"]
    papers = tomllib.loads((ROOT / "papers" / "pyproject.toml").read_text(encoding="utf-8"))
    assert papers["project"]["version"] == headwise.__version__


def test_the_wheels_metadata_is_what_an_index_shows(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Version"] == headwise.__version__
    assert {"Programming Language :: Python :: 3.11", "Typing :: Typed"} <= set(metadata.get_all("Classifier"))
    assert metadata["License-Expression"] or metadata["License"]
    # Only torch: everything else is an extra.
    plain = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert [re.match(r"[\w-]+", line).group() for line in plain] == ["torch"]


def test_the_description_on_an_index_has_no_picture_or_link_that_leads_nowhere(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
    metadata = Parser().parsestr(wheel.read(name).decode())
    shown = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert shown.startswith("# headwise\n") and "## Methods by symptom" in shown and "[![" not in shown
    targets = re.findall(r"\]\(([^)]*)\)", shown)
    assert all(target.startswith(("https://", "http://", "#")) for target in targets), targets
    # the text of links is kept, and the README itself has both
    written = (ROOT / "README.md").read_text(encoding="utf-8")
    assert (
        'src="docs/pictures/forest-light.svg"' in written
        and "](docs/start.md)" in written
        and "your first ten minutes" in shown
    )
    assert "<!--" not in shown and "docs/pictures" not in shown and "<picture" not in shown


def test_the_version_is_said_once_and_told_by_the_command():
    done = subprocess.run([sys.executable, "-m", "headwise", "--version"], capture_output=True, text=True, check=False)
    assert done.stdout == f"headwise {headwise.__version__}\n"
    assert f"version: {headwise.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## [{headwise.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
