"""Every public name has an example that runs: in its docstring, or for a method on its page of the site."""

from __future__ import annotations

import ast
import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from examples_run import public

from headwise.attend import methods

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pages():
    # after the session's own path, so that no test finds another module of this name
    sys.path.append(str(ROOT / "docs" / "site"))
    sys.path.append(str(ROOT / "docs"))
    import method_pages

    yield method_pages
    sys.path.remove(str(ROOT / "docs" / "site"))
    sys.path.remove(str(ROOT / "docs"))


def test_every_public_name_has_an_example():
    parser = doctest.DocTestParser()
    assert [name for name, value in public().items() if not parser.get_examples(value.__doc__ or "")] == []


@pytest.mark.grid
def test_the_examples_of_the_docstrings_run():
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT / "src"), str(ROOT / "verdict" / "src"), os.environ.get("PYTHONPATH", "")]
        ),
    }
    command = [sys.executable, str(ROOT / "tests" / "examples_run.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500, env=environment)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert done.stdout.endswith("without one: none\n")


def described(path: Path) -> list[tuple[str, str]]:
    """Return each line of the arguments, attributes and errors of a file's docstrings, with its owner."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef | ast.ClassDef) else None
        for section in re.findall(r"^(?:Args|Attributes|Raises):\n((?: {4}.*\n?|\n)*)", text or "", re.MULTILINE):
            found += [(node.name, line) for line in section.splitlines() if line.strip()]
    return found


def test_what_continues_a_line_on_an_argument_is_no_argument_of_its_own():
    # the reference would show "in" or "cut" as an argument
    files = [path for part in ("src", "verdict/src", "papers/src") for path in (ROOT / part).rglob("*.py")]
    entry = re.compile(r"     |    [\w*]+(, [\w*]+)*( \(.*\))?: ")
    assert files
    assert [(path.name, *one) for path in files for one in described(path) if not entry.match(one[1])] == []


@pytest.mark.parametrize("name", methods.__all__)
def test_the_example_on_a_methods_page_runs(pages, name):
    code = pages.example(name)
    assert f"headwise.{name}(" in code
    space: dict[str, object] = {}
    exec(code, space)
    assert space["loss"].isfinite()
