"""Power, equivalence, pairing, divergence, trend and aggregation: against scipy, statsmodels and simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from headwise_verdict.results.across import aggregate
from headwise_verdict.results.diverged_runs import mcnemar
from headwise_verdict.results.intervals import JointIntervals, equivalence
from headwise_verdict.results.joint_flips import joint_test
from headwise_verdict.results.power import detectable_effect, pairing_gain
from headwise_verdict.results.trend import trend


def oracle(name):
    return pytest.importorskip(name, reason="statsmodels is not installed (requirements/test.txt)")


@pytest.mark.parametrize("pairs", [6, 10, 40])
def test_the_detectable_effect_of_one_arm_is_that_of_statsmodels(pairs):
    power = oracle("statsmodels.stats.power").TTestPower()
    wanted = power.solve_power(nobs=pairs, alpha=0.05, power=0.8)
    critical = stats.t.ppf(0.975, pairs - 1)
    assert detectable_effect(2.0, pairs, critical) == pytest.approx(2.0 * wanted, rel=1e-4)


@pytest.mark.grid
def test_the_detectable_effect_is_seen_in_four_of_five_studies():
    rng, seeds, arms = np.random.default_rng(0), 12, 4
    runs = rng.normal(size=(300, seeds, arms + 1))
    tables = runs[..., 1:] - runs[..., :1]
    critical = []
    for table in tables[:40]:
        intervals = JointIntervals(table)
        critical += [
            (found.high - found.low) / 2 / error for found, error in zip(intervals.bounds(0.05), intervals.errors())
        ]
    effect = detectable_effect(2**0.5, seeds, float(np.mean(critical)))
    seen = [joint_test(table + np.array([effect, 0, 0, 0])).corrected[0] < 0.05 for table in tables]
    assert np.mean(seen) == pytest.approx(0.8, abs=0.06)


def test_differences_without_spread_would_show_any_effect():
    assert detectable_effect(0.0, 6, 3.0) == 0.0


@pytest.mark.parametrize(("centre", "margin"), [(0.0, 1.0), (0.3, 0.8), (0.6, 0.5), (-0.2, 0.4)])
def test_equivalence_of_one_arm_is_that_of_two_one_sided_tests(centre, margin):
    weightstats = oracle("statsmodels.stats.weightstats")
    table = np.random.default_rng(7).normal(centre, 1, (16, 1))
    wanted = weightstats.ttost_paired(table[:, 0], np.zeros(16), -margin, margin)[0]
    (found,) = equivalence(JointIntervals(table), margin)
    assert found.p == pytest.approx(wanted, abs=0.02)
    assert found.equivalent == (wanted < 0.05)


def test_equivalence_is_the_joint_interval_of_ninety_percent_within_the_margin():
    table = np.random.default_rng(8).normal(0.1, 0.3, (10, 5))
    intervals = JointIntervals(table)
    for found, bounds in zip(equivalence(intervals, 0.5), intervals.bounds(0.1)):
        assert found.within == pytest.approx(max(abs(bounds.low), abs(bounds.high)))
        assert found.equivalent == (found.within < 0.5) == (found.p < 0.05)


@pytest.mark.grid
def test_equivalence_is_wrongly_said_of_any_arm_in_five_percent_at_most():
    rng = np.random.default_rng(9)
    wrong = []
    for _ in range(300):
        runs = rng.normal(size=(10, 6))
        wrong.append(
            any(found.equivalent for found in equivalence(JointIntervals(runs[:, 1:] - runs[:, :1] + 2.0), 2.0))
        )
    assert np.mean(wrong) <= 0.075


def test_the_same_arm_again_is_equivalent_whatever_the_margin():
    (found,) = equivalence(JointIntervals(np.zeros((6, 1))), 1e-9)
    assert found.equivalent and found.within == 0.0


def test_no_margin_makes_no_verdict_and_one_pair_no_margin():
    (found,) = equivalence(JointIntervals(np.ones((1, 1))), None)
    assert (found.within, found.p, found.equivalent) == (None, None, False)


def test_pairing_won_what_the_variances_say():
    rng = np.random.default_rng(10)
    shared = rng.normal(size=4000) * 3
    ours, base = shared + rng.normal(size=4000), shared + rng.normal(size=4000)
    # variances 10 + 10 unpaired, 2 paired
    assert pairing_gain(ours, base) == pytest.approx(10, rel=0.1)
    assert pairing_gain(rng.normal(size=4000), rng.normal(size=4000)) == pytest.approx(1, rel=0.1)
    assert pairing_gain([1.0, 2.0], [1.0, 3.0]) is None
    assert pairing_gain([1.0, 2.0, 3.0], [0.0, 1.0, 2.0]) is None


@pytest.mark.parametrize(("ours", "base", "both"), [(8, 0, 1), (6, 2, 0), (0, 0, 4), (3, 3, 2)])
def test_mcnemar_is_that_of_statsmodels(ours, base, both):
    tables = oracle("statsmodels.stats.contingency_tables")
    one = [True] * ours + [False] * base + [True] * both + [False] * 3
    other = [False] * ours + [True] * base + [True] * both + [False] * 3
    wanted = tables.mcnemar([[both, ours], [base, 3]], exact=True).pvalue
    assert mcnemar(one, other) == pytest.approx(min(1.0, wanted))


def test_a_trend_is_found_where_there_is_one_and_has_the_size_that_was_put_in():
    rng = np.random.default_rng(11)
    shared = rng.normal(size=(10, 1)) * 5
    rising = shared + 0.8 * np.arange(6) + rng.normal(size=(10, 6)) * 0.5
    found = trend(rising)
    assert found.step == pytest.approx(0.8, abs=0.1)
    assert found.p == pytest.approx(2 / 2**10) and found.page < 1e-4
    falling = trend(-rising)
    assert falling.step == pytest.approx(-found.step) and falling.page == pytest.approx(found.page)


def test_a_trend_is_wrongly_found_in_five_percent():
    rng = np.random.default_rng(12)
    found = [trend(rng.normal(size=(10, 5))) for _ in range(1500)]
    assert np.mean([one.p < 0.05 for one in found]) == pytest.approx(0.05, abs=0.015)
    assert np.mean([one.page < 0.05 for one in found[:200]]) <= 0.09


def test_a_trend_needs_three_values_and_two_whole_seeds():
    assert trend(np.zeros((5, 2))) is None
    holes = np.arange(12.0).reshape(3, 4)
    holes[0, 1] = holes[1, 2] = np.nan
    assert trend(holes) is None


def test_two_data_sets_are_put_together_in_units_of_their_spread():
    rng = np.random.default_rng(13)
    small, large = rng.normal(0.8, 1, 400) * 0.01, rng.normal(0.8, 1, 400) * 100
    found = aggregate({"a": small, "b": large})
    assert found.mean == pytest.approx(0.8, abs=0.1)
    assert found.low < found.mean < found.high and found.data_sets == 2
    assert found == aggregate({"a": small, "b": large})


def test_data_sets_that_disagree_widen_the_interval():
    rng = np.random.default_rng(14)
    tables = {str(at): rng.normal(0.8, 1, 60) for at in range(6)}
    apart = {name: table + (1.5 if at % 2 else -1.5) for at, (name, table) in enumerate(tables.items())}
    one, other = aggregate(tables), aggregate(apart)
    assert other.high - other.low > 3 * (one.high - one.low)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"a": [1.0, 2.0, 3.0]}, "give two or more"),
        ({"a": [1.0, 2.0, 3.0], "b": [1.0, 2.0]}, "b has 2 pairs"),
        ({"a": [1.0, 2.0, 3.0], "b": [0.5, 0.5, 0.5]}, "b has 3 pairs whose differences have a range of 0"),
    ],
)
def test_what_has_no_scale_is_refused(tables, message):
    with pytest.raises(ValueError, match=message):
        aggregate(tables)
