"""Arms that lost pairs are judged with all others: what is lost makes no verdict, and widens nobody else's interval."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from study_analysis.test_claims import study
from study_analysis.test_critical_rates import PLAIN, axis, swept
from study_analysis.test_joint_flips import drawn

from headwise_verdict.results.critical_rates import critical_rates
from headwise_verdict.results.differences import paired_differences
from headwise_verdict.results.intervals import JointIntervals
from headwise_verdict.results.joint_flips import joint_test, scores, t_of


def with_holes(table: np.ndarray, holes: dict[int, list[int]]) -> np.ndarray:
    """Return the table without these seeds of these arms."""
    left = table.copy()
    for arm, seeds in holes.items():
        left[seeds, arm] = np.nan
    return left


def judged_study(table: np.ndarray, **more):
    """Return the differences of a study whose losses differ from the baseline's by the table's columns."""
    base = np.linspace(0.5, 0.6, len(table))
    figures = {"baseline": list(base)}
    for at, column in enumerate(table.T):
        figures[f"A({at})"] = [float(one) if np.isfinite(one) else None for one in base + column]
    made = study(figures, outcome="test/loss")
    return paired_differences(made, "test/loss", False, **more)


def test_an_arm_that_lost_a_pair_is_corrected_for_all_arms():
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(80):
        table = with_holes(drawn(rng, 10, 8), {arm: [int(rng.integers(10))] for arm in range(8)})
        wrong += any(one.verdict in ("better", "worse") for one in judged_study(table).values())
    # 5 % are 4 studies; where each such arm was judged by itself, it was every fourth
    assert wrong <= 9


@pytest.mark.parametrize("lost", [1, 3, 4, 8])
def test_whatever_is_lost_some_arm_is_wrong_in_five_percent(lost):
    rng = np.random.default_rng(lost)
    wrong, by_steps = 0, 0
    for _ in range(600):
        table = with_holes(drawn(rng, 10, 6), {arm: list(rng.permutation(10)[:lost]) for arm in range(3)})
        wrong += min(JointIntervals(table).p_zero()) < 0.05
        by_steps += min(joint_test(table).corrected) < 0.05
    assert 3 <= wrong <= 48 and 3 <= by_steps <= 54


def test_the_p_of_an_arm_that_lost_a_pair_is_at_least_its_p_alone():
    table = with_holes(drawn(np.random.default_rng(5), 9, 4, 0.6), {0: [2], 1: [0, 4]})
    found = judged_study(table)
    assert all(one.p_corrected >= one.p for one in found.values())
    assert found["A(1)"].n == 7 and found["A(1)"].excluded == [0, 4]
    # the same test by steps, on the same scale
    assert any(one.p_corrected > one.p for one in list(found.values())[:2])


def test_an_arm_with_too_few_pairs_for_a_verdict_widens_no_other():
    table = drawn(np.random.default_rng(2), 10, 3, 0.8)
    alone = JointIntervals(table[:, 1:])
    both = JointIntervals(with_holes(table, {0: list(range(5))}))
    assert both.p_zero()[1:] == alone.p_zero()
    for one, other in zip(both.bounds(0.05)[1:], alone.bounds(0.05)):
        assert (one.low, one.high) == pytest.approx((other.low, other.high), rel=1e-6)
    # with one pair more it competes with them
    more = JointIntervals(with_holes(table, {0: list(range(4))}))
    wider, other = more.bounds(0.05)[1], both.bounds(0.05)[1]
    assert wider.high - wider.low > 1.01 * (other.high - other.low)
    # its own interval is Student's, for all arms
    own = table[5:, 0]
    half = stats.t.ppf(1 - 0.05 / 6, 4) * own.std(ddof=1) / 5**0.5
    assert both.bounds(0.05)[0][:2] == pytest.approx((own.mean() - half, own.mean() + half))


def test_where_all_arms_have_few_pairs_they_are_judged_together():
    table = drawn(np.random.default_rng(3), 4, 3)
    together, alone = JointIntervals(table).p_zero(), [JointIntervals(table[:, [at]]).p_zero()[0] for at in range(3)]
    assert all(one >= other for one, other in zip(together, alone)) and together != alone


@pytest.mark.parametrize("pairs", [3, 6, 12, 40])
def test_scores_are_the_normal_deviates_of_t(pairs):
    t = np.array([0.0, 0.5, 1.5, 3.0])
    values = np.random.default_rng(0).normal(size=pairs)
    values = (values - values.mean()) / values.std(ddof=1) * pairs**0.5
    tables = values[:, None] + t
    many = np.full(4, pairs)
    found = scores(tables.sum(axis=0), (tables**2).sum(axis=0), many)
    expected = stats.norm.isf(stats.t.sf(t, pairs - 1))
    assert np.sqrt(found) == pytest.approx(expected, abs=0.03 if pairs == 3 else 0.01)
    assert t_of(found, many) == pytest.approx(t, abs=1e-9)


def test_the_interval_of_an_arm_that_lost_pairs_holds_what_its_test_does_not_exclude():
    intervals = JointIntervals(with_holes(drawn(np.random.default_rng(7), 10, 4, 0.5), {0: [1, 2, 3]}))
    for at, bounds in enumerate(intervals.bounds(0.05)):
        for end, way in ((bounds.low, -1), (bounds.high, 1)):
            values = np.array(intervals.means)
            step = 1e-4 * (bounds.high - bounds.low)
            values[at] = end - way * step
            assert intervals.p(values)[at] >= 0.05
            values[at] = end + way * step
            assert intervals.p(values)[at] < 0.05


def test_critical_rates_of_sweeps_with_missing_seeds_are_corrected_for_all_sweeps():
    others = [axis(f"S{at}()") for at in range(4)]
    first, rises = [1, 1, 1, 1, 1, 1, 1, 1], [2, 2, 1, 2, 2, 2, 2, 1]
    made = swept(first, rises, axes=(PLAIN, others[0]))
    (_, alone) = critical_rates(made)
    figures = {"baseline": [0.5] * 8}
    rows = [first, rises, *(list(np.random.default_rng(at).integers(0, 3, 8)) for at in range(3))]
    for one, begins in zip((PLAIN, *others), rows):
        for at, arm in enumerate(one.arms):
            figures[arm] = ["diverged" if at >= begin else 0.5 for begin in begins]
    # the seed of no change is lost
    for arm in others[0].arms:
        figures[arm][2] = None
    found = critical_rates(study(figures, axes=(PLAIN, *others)))[1]
    assert found.pairs == 7 and found.p > alone.p


def test_an_arm_that_is_not_paired_leaves_the_others_their_share_of_the_error():
    rng = np.random.default_rng(4)
    table = drawn(rng, 8, 2, 1.5)
    base = np.linspace(0.5, 0.6, 8)
    figures = {"baseline": list(base), "A()": list(base + table[:, 0]), "B()": list(base + table[:, 1])}
    made = study(figures, outcome="test/loss")
    for (arm, _), run in made.runs.items():
        evidence = {"weights": "1" if arm == "B()" else "0"}
        object.__setattr__(run, "result", run.result.model_copy(update={"evidence": evidence}))
    found = paired_differences(made, "test/loss", False)
    alone = JointIntervals(table[:, :1])
    assert not found["B()"].paired
    assert found["A()"].p_corrected == pytest.approx(2 * alone.p_zero()[0])
    assert found["A()"].smallest_p == pytest.approx(2 * 2 / 2**8)
    assert (found["A()"].low, found["A()"].high) == pytest.approx(alone.bounds(0.025)[0][:2])
