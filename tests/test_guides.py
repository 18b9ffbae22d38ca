"""The guides in docs/ are followed to the letter in a copy of the tree: files, edits, checks. Each touches one
room."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"```(python|diff|toml)\n(.*?)```", re.DOTALL)
# Guide, its room, and the commands that it instructs the reader to run.
GUIDES = {
    "add_a_method": (
        "methods",
        [
            ["-m", "pytest", "-p", "no:cacheprovider", "tests/methods/test_head_mean.py"],
            ["-c", "import headwise; assert 'HeadMean' in headwise.__all__; print(headwise.HeadMean(mix=0.1))"],
            ["docs/methods_table.py"],
            ["docs/catalogue.py"],
            ["docs/methods_table.py", "--check"],
        ],
    ),
    "add_a_statistic": (
        "statistics",
        [
            [
                "-m",
                "pytest",
                "-p",
                "no:cacheprovider",
                "tests/statistics/test_statistic_values.py",
                "-k",
                "every_statistic_equals",
            ]
        ],
    ),
    "add_a_host": ("hosts", []),
    "add_a_section": ("reporting", []),
    "add_a_study": (
        "headwise_papers",
        [
            [
                "-m",
                "headwise",
                "compare",
                "majority",
                "--seeds",
                "1",
                "--epochs",
                "1",
                "--jobs",
                "1",
                "--out",
                "results/majority",
            ]
        ],
    ),
}


def edited(text, steps, where):
    """Return the text after the steps of a diff: a line with a minus is removed, one with a plus is inserted after the
    line before it."""
    lines, place = text.splitlines(), -1
    for step in steps:
        sign, line = step[:1], step[1:]
        if sign == "+":
            place += 1
            lines.insert(place, line)
        else:
            assert line in lines[place + 1 :], f"{where} has no line {line!r} after line {place + 1}"
            place = lines.index(line, place + 1)
            if sign == "-":
                del lines[place]
                place -= 1
    return "\n".join(lines) + "\n"


def follow(guide, tree):
    """Follow a guide in a copy of the tree; return the files it wrote and the remaining code to run."""
    written, code = [], []
    for kind, block in BLOCK.findall((ROOT / "docs" / f"{guide}.md").read_text(encoding="utf-8")):
        first, _, rest = block.partition("\n")
        if kind == "diff":
            path = first.removeprefix("--- ")
            (tree / path).write_text(
                edited((tree / path).read_text(encoding="utf-8"), rest.splitlines(), path), encoding="utf-8"
            )
        elif kind == "toml":
            if guide != "add_a_method":
                continue
            path = "docs/site/methods.toml"
            with (tree / path).open("a", encoding="utf-8") as page:
                page.write(f"\n{block}")
        elif re.fullmatch(r"# [\w/]+\.py", first):
            path = first.removeprefix("# ")
            assert not (tree / path).exists(), f"{guide} writes over {path}"
            (tree / path).write_text(rest, encoding="utf-8")
        else:
            code.append(block)
            continue
        written.append(path)
    return written, "\n".join(code)


def run(arguments, tree):
    paths = os.pathsep.join(
        map(str, (tree / "src", tree / "verdict" / "src", tree / "papers" / "src", tree / "tests", tree))
    )
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=tree,
        env=environment,
    )
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def reinstall(package):
    """Write the entry points of a package next to its sources, like `pip install -e`."""
    named = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = package / "src" / f"{named['name'].replace('-', '_')}.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: {named['name']}\nVersion: {named['version']}\n")
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items())
        for group, points in named["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.mark.grid
@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_works_and_touches_one_room(guide, tmp_path):
    room, commands = GUIDES[guide]
    parts = (
        "src",
        "verdict",
        "papers",
        "tests",
        *(("docs",) if any("docs/" in one for c in commands for one in c) else ()),
    )
    for part in parts:
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for file in ("pyproject.toml", "README.md", "conftest.py"):
        shutil.copy(ROOT / file, tmp_path)
    written, code = follow(guide, tmp_path)
    reinstall(tmp_path / "papers")
    assert {Path(path).parts[-2] for path in written if "src/" in path} == {room}
    assert re.search(
        rf"`(papers/|verdict/)?src/(headwise\w*/)?(\w+/)?{room}/",
        (ROOT / "docs" / f"{guide}.md").read_text(encoding="utf-8"),
    )
    (tmp_path / "followed.py").write_text(
        f"import headwise\nassert headwise.__file__.startswith({str(tmp_path)!r})\n{code}"
    )
    run(["followed.py"], tmp_path)
    for command in commands:
        run(command, tmp_path)


def test_a_method_is_one_file_and_one_line():
    blocks = BLOCK.findall((ROOT / "docs" / "add_a_method.md").read_text(encoding="utf-8"))
    written = [line for _, block in blocks for line in [block.split("\n")[0]] if line.startswith("# src/")]
    added = [line for kind, block in blocks if kind == "diff" for line in block.splitlines() if line.startswith("+")]
    assert (len(written), len(added)) == (1, 1)


@pytest.mark.parametrize("guide", [*GUIDES, "tasks"])
def test_contributing_names_the_guide(guide):
    assert f"docs/{guide}.md" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_guide_is_followed():
    assert {path.stem for path in (ROOT / "docs").glob("add_a_*.md")} == set(GUIDES)
