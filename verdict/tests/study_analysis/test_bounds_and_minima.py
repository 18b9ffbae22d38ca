"""Intervals of shares end where shares do, and arms that are not paired need as many seeds as pairs do."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from study_analysis.test_claims import study

from headwise_verdict.results.analysis import analyse_study
from headwise_verdict.results.claims import judge
from headwise_verdict.results.differences import paired_differences, unpaired_difference
from headwise_verdict.results.records import Claim, ClaimTest


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


def test_the_interval_of_a_difference_of_shares_stays_between_minus_1_and_1():
    rare, common = [0.0, 0.0, 0.0, 0.0, 0.0, 0.7], [1.0, 1.0, 1.0, 1.0, 1.0, 0.9]
    figures = {"baseline": rare, "A()": common}
    entry = analyse_study(study(figures, margin=0.1)).arms[1].differences["test/accuracy"]
    assert 0 < entry.low < entry.mean < entry.high == 1 and entry.within == 1
    reverse = analyse_study(study({"baseline": common, "A()": rare})).arms[1].differences["test/accuracy"]
    assert (reverse.low, reverse.high) == (-1, pytest.approx(-entry.low))
    # losses have no such end, and a rate above 1 is no share
    loss = analyse_study(study(figures, outcome="test/loss")).arms[1].differences["test/loss"]
    assert loss.high > 1 and loss.mean == entry.mean
    rates = {"baseline": [0.0, 0.1, 0.2, 0.0, 0.1, 0.2], "A()": [0.9, 1.4, 1.2, 1.3, 0.9, 1.3]}
    entry = analyse_study(study(rates)).arms[1].differences["test/accuracy"]
    assert entry.high > entry.mean > 1


def test_claims_on_shares_have_intervals_on_the_scale_of_their_differences():
    rare, common = [0.0, 0.0, 0.0, 0.0, 0.0, 0.7], [1.0, 1.0, 1.0, 1.0, 1.0, 0.9]
    against = ClaimTest(arm="A()", against="baseline", outcome="test/accuracy", says="higher")
    level = ClaimTest(arm="A()", outcome="test/accuracy", says="higher", level=0.2)
    by = ClaimTest(arm="A()", against="baseline", outcome="test/accuracy", says="higher", by=0.25)
    tests = judge(study({"baseline": rare, "A()": common}), Claim(text="", tests=(against, level, by))).tests
    assert [test.high for test in tests] == pytest.approx([1, 0.8, 0.75])
    assert [test.inner_high for test in tests] == pytest.approx([1, 0.8, 0.75])
    assert "+100.00]" in tests[0].ours and "+80.00]" in tests[1].ours
    assert "+100.00]" in tests[2].ours


def test_figures_that_are_the_same_in_every_seed_have_no_interval_in_words():
    level = ClaimTest(arm="A()", outcome="test/accuracy", says="higher", level=0.2)
    against = ClaimTest(arm="A()", against="baseline", outcome="test/accuracy", says="higher")
    claim = Claim(text="", tests=(level, against))
    first, second = judge(study({"baseline": [0.25] * 8, "A()": [0.5] * 8}), claim).tests
    assert first.ours.endswith("compared with 20.00 %: +30.00 points, the same in all 8 seeds")
    assert second.ours.endswith("baseline 25.00 %: +25.00 points, the same in all 8 seeds")
    varied, _ = judge(study({"baseline": [0.25] * 8, "A()": [0.5] * 7 + [0.51]}), claim).tests
    assert varied.ours.endswith("]") and "[" in varied.ours
