"""What methods add to a training step on a GPU, counted without one, does not grow beyond the kept rows."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from integration import fake_device

from headwise.attend.core.method import REGISTRY

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import cuda_costs  # noqa: E402
import host_costs  # noqa: E402
from training_models import MODELS  # noqa: E402

# its files study.py and watch.py have the names of folders of tests
sys.path.remove(str(ROOT / "benchmarks"))

SOME = ("DropHead()", "EntropyPenalty()", "SigmaReparam()")

counts_here = [
    pytest.mark.timeout(1000),
    pytest.mark.skipif(sys.platform != "linux", reason="the device is preloaded as Linux does it"),
    pytest.mark.skipif(
        fake_device.COMPILER is None, reason="there is no C++ compiler: install g++, or name one in CXX"
    ),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a CUDA of its own"),
]


def with_marks(test):
    for mark in counts_here:
        test = mark(test)
    return test


@with_marks
def test_some_methods_add_no_more_than_is_kept():
    found = cuda_costs.count([("GPT-2 small", method) for method in SOME])
    assert [row["method"] for row in found] == list(SOME)
    assert not cuda_costs.grown(found, cuda_costs.kept())


@pytest.mark.grid
@with_marks
def test_every_method_adds_no_more_than_is_kept():
    found = cuda_costs.count([(model, method) for model in MODELS for method in cuda_costs.subjects()])
    assert not cuda_costs.grown(found, cuda_costs.kept())


def test_every_method_has_a_row_for_each_model():
    rows = {(row["model"], row["method"]): row for row in cuda_costs.kept()}
    assert set(rows) == {(model, method) for model in MODELS for method in cuda_costs.subjects()}
    # a method that a model cannot take says why
    assert all(row["note"] or float(row["step"]) > 0 for row in rows.values())


@pytest.mark.parametrize("name", ["forward", "after", "megabytes", "largest", "on_cpu", "step"])
def test_a_figure_that_grows_is_told(name):
    kept = cuda_costs.kept()
    row = next(row for row in kept if row["method"] == "EntropyPenalty()")
    assert not cuda_costs.grown([row], kept)
    assert cuda_costs.grown([row | {name: float(row[name]) * 1.01 + 1}], kept)
    assert not cuda_costs.grown([row | {name: float(row[name]) - 1}], kept)


def test_a_method_that_cannot_be_counted_any_more_is_told():
    kept = cuda_costs.kept()
    row = next(row for row in kept if not row["note"])
    assert cuda_costs.grown([row | {"note": "failed: RuntimeError"}], kept)
    assert cuda_costs.grown([row | {"method": "Unknown()"}], kept)


def test_the_page_is_that_of_the_kept_rows():
    assert cuda_costs.PAGE.read_text(encoding="utf-8") == cuda_costs.page(cuda_costs.kept())


def calls_of_the_host(methods):
    """Return the counted rows; in a process of its own, as what else was imported changes what Python calls."""
    program = "import json, sys, host_costs\nfor name in sys.argv[1:]: print(json.dumps(host_costs.counted(name)))"
    done = subprocess.run(
        [sys.executable, "-c", program, *methods], cwd=ROOT / "benchmarks", capture_output=True, text=True, check=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [row | {"method": name} for name, row in zip(methods, lines, strict=True)]


same_versions = pytest.mark.skipif(
    f"torch {torch.__version__}, Python {platform.python_version()}" not in host_costs.kept()[0],
    reason="other versions call other operators",
)


@same_versions
def test_the_host_calls_no_more_operators_and_functions_than_is_kept_for_some_methods():
    assert not host_costs.grown(calls_of_the_host(SOME), host_costs.kept()[1])


@pytest.mark.grid
@pytest.mark.timeout(1000)
@same_versions
def test_the_host_calls_no_more_operators_and_functions_than_is_kept():
    rows = host_costs.kept()[1]
    assert not host_costs.grown(calls_of_the_host([row["method"] for row in rows]), rows)


@pytest.mark.parametrize("name", ["operators", "calls"])
def test_a_count_of_the_host_that_grows_is_told(name):
    rows = host_costs.kept()[1]
    row = next(row for row in rows if row["method"] == "DropHead()")
    assert not host_costs.grown([row], rows)
    assert host_costs.grown([row | {name: str(float(row[name]) * 1.01 + 1)}], rows)
    assert not host_costs.grown([row | {name: str(float(row[name]) - 1)}], rows)


def test_every_method_has_a_row_of_the_host():
    assert {row["method"] for row in host_costs.kept()[1]} == set(cuda_costs.subjects()) - {"watch"}


def test_every_form_that_is_counted_exists():
    for form in cuda_costs.FORMS:
        eval(form, {}, dict(REGISTRY))
