"""Numbers of the analysis that simulations are too coarse for: Hedges' factor, seeds needed, the end of an axis."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from study_analysis.test_claims import study

from headwise_verdict.results.across import aggregate
from headwise_verdict.results.differences import _judged
from headwise_verdict.results.intervals import JointIntervals
from headwise_verdict.results.power import power_of, power_of_sameness, seeds_needed
from headwise_verdict.results.records import AxisRecord
from headwise_verdict.results.trend import _page, trends


def test_few_pairs_are_corrected_by_hedges_factor():
    found = aggregate({"a": [1.0, 2.0, 3.0, 4.0], "b": [2.0, 4.0, 6.0, 8.0]})
    # mean over standard deviation is 2.5 / 1.2910 in both; the factor of three degrees of freedom is 1 − 3/11
    assert found.mean == pytest.approx(2.5 / math.sqrt(5 / 3) * (1 - 3 / 11))


def test_a_data_set_drawn_twice_gives_two_draws_of_its_seeds():
    rng = np.random.default_rng(3)
    values = rng.normal(0.8, 1, 40)
    # two equal data sets: an interval of one is wider than that of two independent draws, by √2 at most
    both = aggregate({"a": values, "b": values})
    draws = values[rng.integers(0, 40, (4000, 40))]
    low, high = np.percentile(draws.mean(axis=1) / draws.std(axis=1, ddof=1) * (1 - 3 / 155), [2.5, 97.5])
    assert (both.high - both.low) == pytest.approx((high - low) / math.sqrt(2), rel=0.06)


@pytest.mark.parametrize("effect", [0.3, 0.5, 1.0, 5.0])
def test_the_seeds_needed_are_the_fewest_with_the_power(effect):
    from scipy import stats

    critical = float(stats.t.isf(0.025, 9))
    needed = seeds_needed(lambda seeds, bound: power_of(effect, seeds, bound), critical, 10, 6)
    by_hand = next(n for n in range(6, 500) if power_of(effect, n, float(stats.t.isf(0.025, n - 1))) >= 0.8)
    assert needed == by_hand
    assert seeds_needed(lambda *_: 0.0, critical, 10, 6) is None
    assert seeds_needed(lambda *_: 1.0, critical, 10, 6) == 6


@pytest.mark.parametrize(("best", "inside"), [(0, False), (1, True), (2, True), (3, False)])
def test_only_what_is_between_the_ends_of_an_axis_is_inside(best, inside):
    values = [0.1, 0.2, 0.3, 0.4]
    arms = [f"A(p={one})" for one in values]
    axis = AxisRecord(name="p", values=values, arms=arms, text="A(p={0.1,0.2,0.3,0.4})")
    figures = {"baseline": [0.5, 0.51, 0.52]}
    for at, arm in enumerate(arms):
        figures[arm] = [0.6 + 0.01 * seed + (0.2 if at == best else 0.001 * at) for seed in range(3)]
    made = study(figures, axes=[axis])
    (found,) = trends(made, {"test/accuracy": made.study.outcome("test/accuracy")})
    assert (found.best, found.inside) == (values[best], inside)


@pytest.mark.parametrize("pairs", [3, 6, 20])
def test_without_an_effect_a_tests_power_is_its_level(pairs):
    critical = float(stats.t.isf(0.025, pairs - 1))
    assert power_of(0.0, pairs, critical) == pytest.approx(0.05, rel=2e-3)


def test_the_power_of_sameness_is_that_of_two_one_sided_tests():
    pairs, margin, effect = 8, 1.3, 0.3
    critical = float(stats.t.isf(0.05, pairs - 1))
    draws = np.random.default_rng(0).normal(effect, 1.0, (200_000, pairs))
    error = draws.std(axis=1, ddof=1) / math.sqrt(pairs)
    inside = (margin - draws.mean(axis=1) > critical * error) & (margin + draws.mean(axis=1) > critical * error)
    assert power_of_sameness(effect, margin, pairs, critical) == pytest.approx(inside.mean(), abs=0.005)


def test_pages_test_looks_both_ways():
    outcomes = np.random.default_rng(1).normal(size=(6, 4)) + 0.4 * np.arange(4)
    up, down = (float(stats.page_trend_test(way).pvalue) for way in (outcomes, -outcomes))
    assert up < 0.2 and down > 0.5
    assert _page(outcomes) == _page(-outcomes) == pytest.approx(2 * up)


def test_arms_without_pairs_leave_the_others_their_share_of_the_level():
    table = np.random.default_rng(2).normal(0.6, 1.0, (7, 2))
    whole, half = _judged(table, None), _judged(table, None, 0.5)
    for at in range(2):
        assert half[at][1] == pytest.approx(min(1.0, 2 * whole[at][1])) and whole[at][1] < 1
        # a wider interval, at half the level
        assert half[at][0].low <= whole[at][0].low and half[at][0].high >= whole[at][0].high


def test_the_errors_of_joint_intervals_are_those_of_means():
    table = np.random.default_rng(3).normal(size=(7, 2))
    table[2, 1] = math.nan
    wanted = [stats.sem(table[:, 0]), stats.sem(table[:, 1], nan_policy="omit")]
    assert JointIntervals(table).errors() == pytest.approx(wanted)
