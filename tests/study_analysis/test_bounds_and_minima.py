"""Intervals of shares end where shares do, and arms that are not paired need as many seeds as pairs do."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from study_analysis.test_claims import study

from headwise.results.analysis import analyse_study
from headwise.results.differences import paired_differences, unpaired_difference


def test_the_interval_of_a_mean_share_stays_between_0_and_1():
    low, high = ([0.011, 0.0, 0.35, 0.02], [0.989, 1.0, 0.65, 0.98])
    analysis = analyse_study(study({"baseline": low, "A()": high}))
    first, second = (arm.metrics["test/accuracy"] for arm in analysis.arms)
    assert first.low == 0 < first.mean < first.high < 1 and second.high == 1 > second.mean > second.low > 0
    # a loss has no such end
    losses = analyse_study(study({"baseline": low, "A()": high}, outcome="test/loss")).arms[0].metrics["test/loss"]
    assert losses.low < 0


def not_paired(seeds, shift=0.2):
    rng = np.random.default_rng(0)
    figures = {arm: list(rng.normal(0.5 + at * shift, 0.01, seeds)) for at, arm in enumerate(("baseline", "A()"))}
    made = study(figures, outcome="test/loss")
    for (arm, _), run in made.runs.items():
        object.__setattr__(run, "result", run.result.model_copy(update={"evidence": {"weights": arm}}))
    return figures, paired_differences(made, "test/loss", False)["A()"]


@pytest.mark.parametrize("seeds", [1, 2, 5])
def test_fewer_than_six_seeds_decide_nothing_without_pairs_either(seeds):
    _, entry = not_paired(seeds)
    assert entry.verdict == "undecided" and not entry.paired
    assert entry.verdict_text.startswith(f"not paired, and cannot be decided with {seeds} seed")


def test_six_seeds_without_pairs_are_judged_by_welch():
    figures, entry = not_paired(6)
    expected = stats.ttest_ind(figures["A()"], figures["baseline"], equal_var=False)
    assert entry.verdict == "worse" and entry.p == pytest.approx(expected.pvalue)
    interval = expected.confidence_interval(0.95)
    assert (entry.low, entry.high) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize("arms", [1, 3])
@pytest.mark.parametrize("sizes", [(6, 6), (9, 6), (7, 12)])
def test_the_unpaired_difference_is_welchs_for_all_arms(sizes, arms):
    rng = np.random.default_rng(sum(sizes))
    ours, base = rng.normal(0.3, 2, sizes[0]), rng.normal(0, 0.5, sizes[1])
    found = unpaired_difference(list(ours), list(base), arms)
    expected = stats.ttest_ind(ours, base, equal_var=False)
    ends = expected.confidence_interval(1 - 0.05 / arms)
    assert found["p"] == pytest.approx(expected.pvalue)
    assert found["p_corrected"] == pytest.approx(min(1, arms * expected.pvalue))
    assert (found["low"], found["high"], found["n"]) == pytest.approx((ends.low, ends.high, min(sizes)))


@pytest.mark.parametrize(("ours", "p"), [([0.5, 0.5, 0.5], 1.0), ([0.75, 0.75, 0.75], 0.0)])
def test_constant_values_differ_surely_or_not_at_all(ours, p):
    found = unpaired_difference(ours, [0.5, 0.5], 2)
    assert found["p"] == found["p_corrected"] == p and found["low"] == found["high"] == found["mean"] == ours[0] - 0.5
