"""Importing the reports costs nothing, and a missing library is named with the extra that brings it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from absent_libraries import run_without
from grids import part_of_grid
from report.synthetic_study import write_study

from headwise.files.optional_imports import load


def test_importing_the_report_imports_no_optional_library():
    heavy = "altair, jinja2, markupsafe, scipy, numpy, torch, vl_convert".split(", ")
    code = (
        "import sys, headwise_verdict.reporting.command, headwise_verdict.pages.shell, headwise_verdict.pages.charts; "
        "import headwise_verdict.results.analysis; "
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_compiler_of_torch_is_imported_by_those_who_compile_alone():
    """It takes as long as torch itself: a second and more of every command and every worker."""
    code = (
        "import sys, headwise.lab.comparing.compare, headwise.lab.engines.worker, headwise.health.watching.watch; "
        "print('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "False"]


def test_a_missing_library_is_named_with_its_extra():
    with pytest.raises(
        ImportError, match=r"headwise needs no_such_library, which is not installed: pip install 'headwise\[study\]'"
    ):
        load("no_such_library", "study")


def test_a_broken_library_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "half_library.py").write_text("import what_it_needs")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="what_it_needs"):
        load("half_library", "study")


@pytest.mark.parametrize("library", part_of_grid(["jinja2", "scipy", "altair"], ["altair"]))
def test_writing_a_report_without_a_library_names_the_extra(library, tmp_path):
    write_study(tmp_path, seeds=3, epochs=2)
    done = run_without({library}, f"import headwise.report\nheadwise.report.write({str(tmp_path)!r})")
    assert f"needs {library}" in done.stderr, done.stderr
    assert "pip install 'headwise[study]'" in done.stderr
