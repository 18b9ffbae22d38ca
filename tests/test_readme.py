"""The README is short and names only what exists; the twenty lines of the demo run."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import headwise

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def a_user_runs(*arguments):
    """Run Python like a user of this environment, without the tests on the path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.grid
def test_the_environment_of_the_tests_is_one_that_a_user_can_work_in():
    done = a_user_runs("-c", "from transformers import LlamaForCausalLM; print(LlamaForCausalLM.__name__)")
    assert done.stdout == "LlamaForCausalLM\n", done.stderr


@pytest.mark.grid
def test_make_demo_runs_the_example():
    code = (ROOT / "examples" / "twenty_lines.py").read_text(encoding="utf-8").split('"""\n\n', 1)[1]
    assert len(code.strip().splitlines()) <= 30
    script = re.search(
        r"^demo: \S+\n\t@echo .*\n\t\$\(PY\) (\S+)\n", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    ).group(1)
    done = a_user_runs(script)
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    assert "regularized" in printed and "DropHead(p=0.2)" in printed
    before, after = map(float, re.search(r"loss before ([\d.]+), after 41 steps ([\d.]+)", printed).groups())
    assert after < before / 2
    # four layers, two figures at two steps
    assert len(re.findall(r"^\d(?: +\d+\.\d{3}){4}$", printed, re.MULTILINE)) == 4
    assert max(map(len, printed.splitlines())) <= 80
    following = re.search(r"\.venv/bin/headwise (compare .*?)\n    then", printed, re.DOTALL)[1].replace("\\\n", " ")
    help_text = a_user_runs("-m", "headwise", *shlex.split(following), "--help")
    assert help_text.returncode == 0 and "--epochs" in help_text.stdout, help_text.stderr


def test_every_target_says_what_it_takes_and_where_the_result_is():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    names = re.search(r"^\.PHONY: (.+)$", text, re.MULTILINE)[1].split()
    for name in {*names} - {"clean"}:
        line = re.search(rf'^{name}:.*\n\t@echo "(make {name}: .+)"$', text, re.MULTILINE)
        assert line and len(line[1]) <= 80 and re.search(r"here|result:|writes", line[1]), name


def test_linked_files_exist():
    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_it_is_read_in_a_minute():
    """Under 120 lines, no table above ten rows, no cell above 214 letters, and four pictures in both schemes."""
    assert len(README.splitlines()) < 120
    tables = re.findall(r"(?:^\|.*\n)+", README, re.MULTILINE)
    assert tables and all(len(table.splitlines()) <= 12 for table in tables)
    cells = [re.sub(r"\]\([^)]*\)|<!--.*?-->", "", cell) for table in tables for cell in table.split("|")]
    assert max(map(len, cells)) <= 140
    pictures = re.findall(
        r'<picture><source media="\(prefers-color-scheme: dark\)" srcset="(.+?)">\n<img .+? src="(.+?)">', README
    )
    assert len(pictures) == 4
    for dark, light in pictures:
        assert dark == light.replace("-light", "-dark")
        assert all((ROOT / path).stat().st_size < 60_000 for path in (dark, light))


def test_the_first_screen_leads_to_a_script_of_your_own():
    screen = README.split("<!-- first screen: begin -->")[1].split("<!-- first screen: end -->")[0]
    command = re.search(r"^headwise (compare --script .+)$", screen, re.MULTILINE)[1]
    assert shlex.split(command)[2] == "python train.py" and "docs/your_script.md" in screen
    assert "HeadwiseCallback(" in screen and "pip install" in screen


def test_the_symptoms_are_those_of_the_table_of_all_methods():
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "methods.md").read_text(encoding="utf-8"), re.MULTILINE)
    anchors = re.findall(r"\]\(docs/methods\.md#([\w-]+)\)", README)
    assert anchors == [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_notebook_is_the_twenty_lines():
    notebook = json.loads((ROOT / "examples" / "first_look.ipynb").read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    lines = (ROOT / "examples" / "twenty_lines.py").read_text(encoding="utf-8").split('"""\n\n', 1)[1]
    assert code[1] == lines.rstrip("\n") and code[0].startswith("%pip install")


def test_unknown_public_names_are_refused():
    with pytest.raises(AttributeError, match="DropHed"):
        _ = headwise.DropHed
    assert "DropHead" in dir(headwise)


def test_functions_are_not_hidden_by_modules_of_their_names():
    from headwise.attend.regularizing.handle import Regularized
    from headwise.attend.regularizing.plan import plan  # noqa: F401

    assert headwise.Regularized is Regularized and callable(headwise.regularize) and callable(headwise.sites)
