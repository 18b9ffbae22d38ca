"""Files around the code: workflows, and files that a forge, an index or a link checker looks for."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_the_makefile_has_and_may_only_read(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = " ".join(step.get("run", "") for step in steps)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"\bmake ([\w-]+)", commands)) <= set(targets)
    assert all("uses" in step or "run" in step for step in steps)
    assert all(job["timeout-minutes"] <= 90 for job in workflow["jobs"].values())


def test_there_are_workflows_for_tests_docs_and_wheels():
    assert {path.stem for path in WORKFLOWS} == {"tests", "docs", "wheels"}


def test_the_other_files_can_be_read():
    assert yaml.safe_load((ROOT / ".readthedocs.yaml").read_text())["version"] == 2
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    paths = re.findall(r"tests/\w+\.py", " ".join(hook["entry"] for hook in repo["hooks"]))
    assert paths and all((ROOT / path).is_file() for path in paths)


def test_the_citation_names_the_source_of_every_method():
    from headwise.attend import methods
    from headwise.attend.core.method import REGISTRY

    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    citation = yaml.safe_load(text)
    assert not re.search(r"[{}\\]", text)
    for one in citation["references"]:
        assert {"type", "title", "authors", "year", "url", "notes"} <= {*one}, one
        assert one["authors"], one
    urls = " ".join(one["url"] for one in citation["references"])
    named = {name for one in citation["references"] for name in re.findall(r"\w+", one["notes"])}
    assert {*methods.__all__} <= named
    for name in methods.__all__:
        for number in re.findall(r"\b\d{4}\.\d{5}\b", REGISTRY[name].paper):
            assert number in urls, f"{name}: {number}"


def test_make_help_lists_every_target():
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    names = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert {*re.findall(r"^make ([\w-]+): ", done.stdout, re.MULTILINE)} == {*names} - {"clean"}


@pytest.mark.parametrize("name", ["llms.txt", "SECURITY.md", "CODE_OF_CONDUCT.md", "RELEASING.md"])
def test_links_lead_to_files(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / target).exists(), target


def test_paths_named_for_contributors_exist():
    said = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    where = said.split("## Where things go")[1].split("\n## ")[0]
    paths = re.findall(r"`((?:src|papers|tests|verdict)/[\w/.]+)`", where)
    assert len(paths) >= 16
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_files_that_begin_first_are_there():
    text = (ROOT / "conftest.py").read_text(encoding="utf-8")
    named = re.findall(r'^    "((?:tests|papers|verdict)/[\w/]+\.py)",$', text, re.MULTILINE)
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / name).is_file()]


@pytest.mark.parametrize("folder", [".", "papers"])
def test_licences_are_spdx_expressions(folder):
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["license"] == "Apache-2.0"
    assert not [one for one in project.get("classifiers", []) if one.startswith("License")]


def test_files_named_in_pages_exist():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    ends = {"/".join(name.split("/")[start:]) for name in tracked for start in range(name.count("/") + 1)}
    # A file of code with its folder, as pages name those of the repository; names alone may be a user's own.
    named = re.compile(r"`((?:src|tests|papers|docs|benchmarks|examples|hosts|results|statistics|methods)/[\w/]+\.py)`")
    missing = {
        f"{page}: {path}"
        for page in tracked
        if page.endswith(".md") and "generated" not in page
        for path in named.findall((ROOT / page).read_text(encoding="utf-8"))
        if path not in ends
    }
    assert not missing, "\n".join(sorted(missing))
