"""A third-party package: installed from a wheel, its method, statistic, task and study are found by name."""

import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

CODE = '''
import torch
from torch import nn

import headwise
from headwise.health.statistics import Statistic, Tally
from headwise.study import Study, Task, VisionTransformer


class HalvedWeights(headwise.Method):
    """Halves the attention weights."""

    share: float = 0.5
    neutral = {"share": 1.0}

    def weights(self, a, call):
        return self.share * a


class KeyNorm(Statistic):
    """Averages the norm of the keys of each head."""

    name = "key_norm"
    unit = "units of k"
    reduction = "mean over keys"

    def tally(self, rows):
        norm = rows.reading.k.norm(dim=-1).float()
        return Tally(norm.sum((0, 2)), torch.full_like(norm[0, :, 0], norm.shape[0] * norm.shape[2]))


class Bright(Task):
    """Tell bright images from dark ones."""

    epochs: int = 1

    def model(self):
        return VisionTransformer(
            classes=2, image_size=8, channels=1, dim=16, depth=1, heads=2, head_dim=8, mlp_dim=16
        )

    def data(self, split):
        images = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(len(split)))
        return images, (images.mean((1, 2, 3)) > 0.5).long()


STUDY = Study(
    name="brightness",
    title="Brightness",
    question="Does halving the weights help to see light?",
    task=Bright(),
    task_place="my_attention:Bright",
    methods=("HalvedWeights(share=0.5)",),
    seeds=1,
)
'''
ENTRY_POINTS = """
[headwise.methods]
HalvedWeights = my_attention:HalvedWeights

[headwise.statistics]
key_norm = my_attention:KeyNorm

[headwise.tasks]
bright = my_attention:Bright

[headwise.studies]
brightness = my_attention
"""


def write_wheel(folder, name="my_attention", code=CODE, entry_points=ENTRY_POINTS):
    """Write a wheel of one module; return its path."""
    wheel, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": entry_points,
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, textwrap.dedent(text))
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD")))
    return wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Install the wheel into a separate folder, and return a function that runs Python with it."""
    folder = tmp_path_factory.mktemp("installed")
    install(write_wheel(folder), folder / "site")

    def run(*arguments, code=0, site=folder / "site"):
        paths = [str(site), *(path for path in sys.path if path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            capture_output=True,
            text=True,
            env=environment,
            cwd=folder,
            timeout=300,
        )
        assert done.returncode == code, done.stdout[-2000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    return run


def install(wheel, site):
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*command, "--target", str(site), str(wheel)], check=True)


def test_its_method_is_listed_and_parsed(installed):
    output = installed("-m", "headwise", "methods")
    assert "HalvedWeights(share=0.5)\n    Halves the attention weights." in output
    assert "DropHead(p=0.2)" in output
    assert "HalvedWeights(share=0.25)" in installed(
        "-c", "import headwise; print(headwise.parse('HalvedWeights(share=0.25)'))"
    )
    assert "Did you mean 'HalvedWeights'" in installed("-c", "import headwise; headwise.parse('HalvdWeights')", code=1)


@pytest.mark.grid
def test_its_statistic_is_read_while_training(installed):
    output = installed(
        "-c",
        """
import headwise, torch
model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
watched = headwise.watch(model, every=1, statistics=["key_norm"])
model(torch.randn(2, 5, 16)).sum().backward()
watched.step()
print({record["statistic"] for record in watched.records()})
""",
    )
    assert "key_norm" in output


@pytest.mark.grid
def test_its_study_is_listed_and_runs(installed, tmp_path):
    output = installed("-m", "headwise", "studies")
    assert "\nbrightness " in output and "Does halving the weights" in output and "\ndigits " in output
    installed("-m", "headwise", "compare", "brightness", "--jobs", "1", "--out", tmp_path / "out")
    assert (tmp_path / "out" / "report.html").is_file()


@pytest.mark.grid
def test_its_task_is_found_by_name(installed, tmp_path):
    installed(
        "-m", "headwise", "compare", "--task", "bright", "--method", "DropHead(p=0.1)", "--seeds", "1", "--jobs", "1",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert (tmp_path / "out" / "report.html").is_file()


@pytest.mark.grid
def test_the_names_of_tasks_are_in_the_message_on_an_unknown_one(installed):
    assert "or the name of an installed task: bright." in installed(
        "-m", "headwise", "compare", "--task", "brigt", code=1
    )


@pytest.mark.grid
def test_a_broken_package_is_named(installed, tmp_path):
    wheel = write_wheel(
        tmp_path, "broken", "raise RuntimeError('no licence')", "[headwise.studies]\nbroken-study = broken\n"
    )
    install(wheel, tmp_path / "site")
    output = installed("-m", "headwise", "compare", "broken-study", code=1, site=tmp_path / "site")
    assert "broken-study of the package broken cannot be loaded" in output
    assert "RuntimeError: no licence" in output
    assert "Repair or uninstall broken" in output


def test_two_packages_with_one_name_are_both_named(installed, tmp_path):
    for name in ("first", "second"):
        install(write_wheel(tmp_path, name, "STUDY = None", f"[headwise.studies]\nsame = {name}\n"), tmp_path / "site")
    output = installed("-m", "headwise", "compare", "same", code=1, site=tmp_path / "site")
    assert "first (first)" in output
    assert "second (second)" in output
    assert "Uninstall one of them" in output


def test_a_study_of_a_package_that_is_not_installed_says_which(monkeypatch):
    from headwise.lab.comparing.request import Request, check
    from headwise.lab.studies import registry
    from headwise_verdict.files.errors import StudyError

    monkeypatch.setattr(registry, "entry_points", lambda group: {})
    with pytest.raises(StudyError, match="pip install -e papers"):
        check(Request(study="blog-cifar10", studies=registry.Installed()))


def test_the_list_of_the_papers_studies_is_that_of_their_package():
    import tomllib

    from headwise.lab.studies.registry import PAPERS

    project = tomllib.loads((Path(__file__).parents[1] / "papers" / "pyproject.toml").read_text(encoding="utf-8"))
    assert sorted(project["project"]["entry-points"]["headwise.studies"]) == sorted(PAPERS)
