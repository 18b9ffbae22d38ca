"""Awkward results: ties, one seed, all equal, all diverged, arms without a figure; held against counting in numpy and
scipy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats
from study_analysis.test_claims import claimed, judged, study

from headwise_verdict.results.analysis import analyse_study

DIFFERENCES = [
    [0.01, 0.01, 0.01, 0.01, -0.01, -0.01, -0.01, -0.01],
    [0.02, 0.02, 0.02, 0.0, 0.0, 0.0, 0.0, 0.0],
    [0.03, 0.02, 0.01, 0.01, 0.02, 0.03, -0.01, 0.01],
    [-0.04, -0.01, -0.01, -0.02, -0.03, -0.01, -0.01, -0.02],
]


def against(differences, **more):
    base = [0.5] * len(differences)
    return study({"baseline": base, "A()": [0.5 + one for one in differences]}, **more)


@pytest.mark.parametrize("differences", DIFFERENCES)
def test_the_p_of_ties_is_that_of_counting_whole_numbers(differences):
    whole = np.array([round(100 * one) for one in differences])
    flipped = np.array(list(itertools.product((1, -1), repeat=len(whole)))) @ whole
    expected = float((abs(flipped) >= abs(whole.sum())).mean())
    entry = analyse_study(against(differences)).arms[1].differences["test/accuracy"]
    assert entry.p_corrected == pytest.approx(expected, abs=1e-12)
    (test,) = judged(against(differences), claimed("higher")).tests
    assert test.p == pytest.approx(expected, abs=1e-12)
    # verdict, p and interval are one test
    assert (test.p < 0.05) == (test.low > 0 or test.high < 0)


@pytest.mark.parametrize("seeds", [1, 2, 5])
@pytest.mark.parametrize("says", ["higher", "lower"])
def test_fewer_than_six_seeds_tell_nothing(seeds, says):
    found = judged(against([0.1] * seeds), claimed(says, effect=0.1 if says == "higher" else -0.1))
    assert found.verdict == "undecided" and found.seeds_needed >= 6


def test_where_all_are_equal_nothing_is_shown_but_sameness_is():
    assert judged(against([0.0] * 8), claimed("higher")).verdict == "undecided"
    assert judged(against([0.0] * 8), claimed("same", margin=0.001)).verdict == "as published"
    entry = analyse_study(against([0.0] * 8)).arms[1].differences["test/accuracy"]
    assert entry.p_corrected == 1 and entry.verdict_text == "no evidence (every difference is 0)"


def test_where_all_diverged_no_figure_is_told():
    found = study({"baseline": ["diverged"] * 8, "A()": ["diverged"] * 8})
    told = judged(found, claimed("higher"))
    assert told.verdict in ("undecided", "not testable here") and told.tests[0].mean is None
    assert judged(found, claimed("lower", outcome="diverged")).verdict == "undecided"
    alone = study({"baseline": ["diverged"] * 8, "A()": [0.5] * 8})
    p = stats.binomtest(0, 8).pvalue
    (test,) = judged(alone, claimed("lower", outcome="diverged")).tests
    assert test.verdict == "as published" and test.p == pytest.approx(p)


@pytest.mark.parametrize("nothing", [math.nan, math.inf, None])
def test_an_arm_without_a_figure_says_so_and_changes_no_other(nothing):
    good = [0.5 + one for one in DIFFERENCES[2]]
    alone = study({"baseline": [0.5] * 8, "A()": good})
    beside = study({"baseline": [0.5] * 8, "A()": good, "B()": [nothing] * 8})
    one, other = (analyse_study(found).arms[1].differences["test/accuracy"] for found in (alone, beside))
    assert (one.low, one.high, one.p_corrected) == (other.low, other.high, other.p_corrected)
    told = judged(beside, claimed("higher", arm="B()"))
    assert told.verdict in ("undecided", "not testable here") and told.tests[0].mean is None
