"""What a step of each study launches on a GPU, counted without one, does not grow, and is captured as it was."""

import sys
from pathlib import Path

import pytest
from kernels.test_cuda_costs import with_marks

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import study_steps

# its files study.py and watch.py have the names of folders of tests
sys.path.remove(str(Path(__file__).parents[2] / "benchmarks"))


@with_marks
def test_a_study_launches_no_more_than_is_kept():
    found = study_steps.count(study_steps.studies()[:1])
    assert len(found) == 1 and not study_steps.grown(found, study_steps.kept())


@pytest.mark.grid
@with_marks
def test_every_study_launches_no_more_than_is_kept():
    found = study_steps.count(study_steps.studies())
    assert len(found) == len(study_steps.studies()) and not study_steps.grown(found, study_steps.kept())


def test_every_study_of_the_gpu_has_a_row_and_the_page_shows_it():
    rows = study_steps.kept()
    assert [(row["study"], row["scale"]) for row in rows] == study_steps.studies()
    # kernels of a forward, a backward and an optimizer
    assert all(int(row["launches"]) > 100 for row in rows)
    assert study_steps.page(rows) == study_steps.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", study_steps.COUNTED)
def test_a_count_that_grows_is_reported_and_one_that_falls_is_not(name):
    (row, *_) = rows = study_steps.kept()
    assert not study_steps.grown(rows, rows)
    assert study_steps.grown([row | {name: int(row[name]) + 1}], rows)
    assert not study_steps.grown([row | {name: int(row[name]) - 1}], rows)


def test_a_step_that_is_captured_no_more_and_an_unknown_study_are_reported():
    (row, *_) = rows = study_steps.kept()
    assert study_steps.grown([row | {"step": "not captured: a number of the device is read in Python"}], rows)
    assert study_steps.grown([row | {"study": "unknown"}], rows)
