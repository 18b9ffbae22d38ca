"""The joint sign-flip test and its intervals: brute force, scipy, the family's error, and what few seeds can decide."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from headwise_verdict.results.intervals import JointIntervals
from headwise_verdict.results.joint_flips import (
    EXACT_UP_TO,
    RESAMPLES,
    joint_test,
    scores,
    seeds_for_a_verdict,
    sign_flip,
    smallest_p,
    t_of,
)


def drawn(rng, seeds, arms, effects=0.0):
    """Draw differences to a shared baseline, as a study has them."""
    runs = rng.normal(size=(seeds, arms + 1))
    return runs[:, 1:] - runs[:, :1] + effects


def t_values(table):
    return abs(table.mean(axis=0)) / (table.std(axis=0, ddof=1) / math.sqrt(len(table)))


def brute_force(table):
    """Step down by hand, one flip after the other, on t itself."""
    seen = t_values(table)
    found = np.array(
        [t_values(np.array(signs)[:, None] * table) for signs in itertools.product((1, -1), repeat=len(table))]
    )
    left, corrected, highest = list(range(table.shape[1])), {}, 0.0
    while left:
        arm = max(left, key=lambda at: seen[at])
        highest = max(highest, float((found[:, left].max(axis=1) >= seen[arm] * (1 - 1e-9)).mean()))
        corrected[arm] = highest
        left.remove(arm)
    return [corrected[at] for at in range(table.shape[1])]


@pytest.mark.parametrize(("seeds", "arms"), [(3, 2), (5, 4), (7, 3)])
def test_the_step_down_test_is_what_counting_by_hand_gives(seeds, arms):
    table = drawn(np.random.default_rng(seeds), seeds, arms, np.linspace(0, 2, arms))
    assert joint_test(table).corrected == pytest.approx(brute_force(table), abs=1e-12)


@pytest.mark.parametrize("seeds", [5, 13])
def test_the_p_of_an_arm_alone_is_that_of_scipy(seeds):
    from scipy import stats

    table = drawn(np.random.default_rng(seeds), seeds, 3, 0.4)
    for arm, p in enumerate(joint_test(table).alone):
        found = stats.permutation_test(
            (table[:, arm],), np.mean, permutation_type="samples", n_resamples=np.inf, batch=4096
        )
        assert p == pytest.approx(found.pvalue, abs=1e-12)


def test_the_family_error_is_five_percent():
    rng = np.random.default_rng(0)
    wrong = [min(joint_test(drawn(rng, 10, 8)).corrected) < 0.05 for _ in range(4000)]
    assert np.mean(wrong) == pytest.approx(0.05, abs=0.01)


@pytest.mark.grid
def test_the_family_error_holds_beside_arms_that_differ():
    rng = np.random.default_rng(1)
    effects = np.array([4.0, 4.0, 4.0, 0, 0, 0, 0, 0])
    wrong = [min(joint_test(drawn(rng, 9, 8, effects)).corrected[3:]) < 0.05 for _ in range(3000)]
    assert np.mean(wrong) == pytest.approx(0.05, abs=0.01)


def test_random_flips_hold_the_error_too():
    rng = np.random.default_rng(2)
    import headwise_verdict.results.joint_flips as module

    few = module.flips(18, resamples=999)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "flips", lambda seeds: few)
        wrong = [min(joint_test(drawn(rng, 18, 8)).corrected) < 0.05 for _ in range(1500)]
    assert np.mean(wrong) == pytest.approx(0.05, abs=0.015)


def test_six_seeds_decide_among_eight_arms_where_holm_cannot():
    table = drawn(np.random.default_rng(3), 6, 8, np.array([9.0, 0, 0, 0, 0, 0, 0, 0]))
    found = joint_test(table)
    assert found.corrected[0] == pytest.approx(2 / 2**6)
    # Holm's step-down takes the smallest of eight times eight
    assert 8 * min(found.alone) >= 0.05 and 8 * smallest_p(6) >= 0.05
    assert JointIntervals(table).bounds(0.05)[0].low > 0


def test_no_verdict_is_possible_below_six_seeds():
    assert seeds_for_a_verdict() == 6
    assert [smallest_p(pairs) for pairs in (0, 1, 2, 5, 6)] == [1.0, 1.0, 0.5, 2 / 2**5, 2 / 2**6]
    assert smallest_p(40) == 1 / (RESAMPLES + 1)


@pytest.mark.parametrize("pairs", [1, 3, 9, EXACT_UP_TO])
def test_the_smallest_p_is_reached_when_all_differences_agree(pairs):
    assert sign_flip(list(np.arange(1.0, pairs + 1))) == pytest.approx(smallest_p(pairs))


def test_equal_differences_are_as_far_from_0_as_can_be_and_zeros_are_not():
    table = np.stack([np.full(8, 1 / 3), np.zeros(8), np.arange(8) - 3.5], axis=1)
    found = joint_test(table)
    assert found.corrected[0] == pytest.approx(2 / 2**8)
    assert found.corrected[1] == 1.0 and found.alone[1] == 1.0


def test_a_missing_pair_leaves_the_other_arms_alone():
    table = drawn(np.random.default_rng(4), 9, 3, 1.0)
    holes = table.copy()
    holes[:2, 1] = np.nan
    found = joint_test(holes)
    assert [found.alone[at] for at in (0, 2)] == pytest.approx([joint_test(table).alone[at] for at in (0, 2)])
    assert found.alone[1] == pytest.approx(sign_flip(list(table[2:, 1])))
    assert joint_test(np.full((3, 2), np.nan)).corrected == [1.0, 1.0]


def test_many_pairs_use_random_flips_that_repeat():
    differences = list(np.random.default_rng(0).normal(0.3, 1, 40))
    p = sign_flip(differences)
    assert p == sign_flip(differences)
    z = np.mean(differences) / (np.sqrt(np.mean(np.square(differences))) / math.sqrt(40))
    assert p == pytest.approx(math.erfc(abs(z) / math.sqrt(2)), abs=0.01)


@pytest.mark.grid
@pytest.mark.parametrize("seeds", [6, 10])
def test_the_intervals_of_all_arms_hold_together(seeds):
    rng, effects = np.random.default_rng(seeds), np.linspace(-2, 3, 8)
    held = []
    for _ in range(400):
        bounds = JointIntervals(drawn(rng, seeds, 8, effects)).bounds(0.05)
        held.append(all(found.low <= effect <= found.high for found, effect in zip(bounds, effects)))
    # the flips of six seeds come in steps of 1/32
    assert np.mean(held) == pytest.approx(0.95 if seeds == 10 else 0.96, abs=0.025)


def test_an_interval_holds_what_its_test_does_not_exclude():
    table = drawn(np.random.default_rng(5), 9, 4, 1.0)
    intervals = JointIntervals(table)
    for arm, found in enumerate(intervals.bounds(0.05)):
        for end, outwards in ((found.low, -1), (found.high, 1)):
            moved = intervals.means.copy()
            moved[arm] = end + outwards * 1e-6
            assert intervals.p(moved)[arm] < 0.05
            moved[arm] = end - outwards * 1e-6
            assert intervals.p(moved)[arm] >= 0.05


def test_one_arm_gets_nearly_the_interval_of_student():
    from scipy import stats

    table = np.random.default_rng(6).normal(0.5, 1, (16, 1))
    (found,) = JointIntervals(table).bounds(0.05)
    half = stats.t.ppf(0.975, 15) * table.std(ddof=1) / 4
    assert (found.low, found.high) == pytest.approx((table.mean() - half, table.mean() + half), abs=0.08)


def test_too_few_pairs_for_flips_get_student_and_one_pair_gets_nothing():
    table = np.array([[1.0, 1.0], [2.0, np.nan], [4.0, np.nan]])
    first, second = JointIntervals(table).bounds(0.05)
    assert first.how == "Student's t, Bonferroni" and first.low < 7 / 3 < first.high
    assert (second.low, second.high) == (None, None)
    (equal,) = JointIntervals(np.full((8, 1), 0.25)).bounds(0.05)
    assert (equal.low, equal.high, equal.how) == (0.25, 0.25, "all differences are equal")


def test_a_score_gives_its_t_back():
    values = np.array([[0.3, 1.0], [0.1, -0.2], [0.5, 0.4], [0.2, 0.9], [np.nan, 0.7]])
    pairs = np.isfinite(values).sum(axis=0)
    known = np.nan_to_num(values)
    found = t_of(scores(known.sum(axis=0), (known**2).sum(axis=0), pairs), pairs)
    assert found == pytest.approx(abs(stats.ttest_1samp(values, 0, nan_policy="omit").statistic))


def test_a_smaller_difference_has_no_smaller_corrected_p():
    rng = np.random.default_rng(0)
    for _ in range(20):
        table = drawn(rng, 8, 4, 0.5)
        test, t = joint_test(table), abs(stats.ttest_1samp(table, 0).statistic)
        in_order = [test.corrected[at] for at in np.argsort(-t)]
        assert in_order == sorted(in_order)
