"""Verdicts of arms: p and interval are one test, an arm that lost pairs disturbs nobody, and divergence is
decidable."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from study_analysis.test_claims import noise, study

from headwise_verdict.results.differences import paired_differences
from headwise_verdict.results.diverged_runs import divergence_tests, mcnemar
from headwise_verdict.results.joint_flips import joint_pairs_test


def arms_of(table) -> dict:
    base = np.linspace(0.4, 0.6, len(table))
    return {"baseline": base.tolist()} | {f"A{at}()": (base + table[:, at]).tolist() for at in range(table.shape[1])}


def test_a_p_below_five_percent_and_an_interval_without_0_are_the_same_thing():
    rng, seen = np.random.default_rng(0), set()
    for _ in range(40):
        shared = rng.normal(size=(10, 1))
        table = 0.01 * (rng.normal(size=(10, 5)) + shared + np.array([0, 0.4, 0.7, 1.0, 1.4]))
        for found in paired_differences(study(arms_of(table)), "test/accuracy", True).values():
            outside = found.low > 0 or found.high < 0
            assert (found.p_corrected < 0.05) == outside == (found.verdict in ("better", "worse"))
            seen.add(outside)
    assert seen == {True, False}


def test_an_arm_that_lost_pairs_widens_no_other_interval():
    table = np.stack([0.02 + 0.01 * noise(10), 0.01 * noise(10)[::-1]], axis=1)
    figures = arms_of(table)
    alone = paired_differences(study(figures), "test/accuracy", True)
    lost = figures | {"B()": ["diverged"] * 8 + [0.1, 0.9]}
    beside = paired_differences(study(lost), "test/accuracy", True)
    assert beside["B()"].n == 2 and beside["B()"].verdict == "undecided"
    for arm in ("A0()", "A1()"):
        assert (beside[arm].low, beside[arm].high) == (alone[arm].low, alone[arm].high)
        assert beside[arm].p_corrected == alone[arm].p_corrected


def test_an_interval_that_excludes_nothing_is_not_given_an_end():
    other = np.array([1.0, 1, 1, 0, 0, 0])
    (found, _) = paired_differences(
        study(arms_of(np.stack([0.02 + 0.001 * noise(6), other], 1))), "test/accuracy", True
    ).values()
    assert (found.low, found.high, found.verdict) == (None, None, "undecided") and found.p_corrected > 0.05


def test_six_of_six_against_none_is_decided_among_many_arms():
    figures = {"baseline": ["diverged"] * 6} | {f"A{at}()": [0.5] * 6 for at in range(8)}
    figures |= {f"B{at}()": ["diverged"] * 5 + [0.5] for at in range(4)}
    found = divergence_tests(study(figures))
    assert {found[f"A{at}()"].p_corrected for at in range(8)} == {2 / 2**6}
    assert found["A0()"].verdict == "less often" and found["B0()"].verdict == "no evidence"


def brute_force(table):
    """Step down by hand, from McNemar's test of every flip."""
    flips = [np.array(signs)[:, None] * table for signs in itertools.product((1, -1), repeat=len(table))]
    p = np.array([[mcnemar(list(column > 0), list(column < 0)) for column in flip.T] for flip in flips])
    left, found, highest = list(range(table.shape[1])), {}, 0.0
    while left:
        arm = min(left, key=lambda at: p[0, at])
        highest = max(highest, float((p[:, left].min(axis=1) <= p[0, arm] + 1e-12).mean()))
        found[arm] = highest
        left.remove(arm)
    return [found[at] for at in range(table.shape[1])]


@pytest.mark.parametrize("seed", range(4))
def test_joint_divergence_is_what_counting_by_hand_gives(seed):
    table = np.random.default_rng(seed).choice([-1, 0, 1, 1], (6, 4)).astype(float)
    found = joint_pairs_test(table)
    assert found.corrected == pytest.approx(brute_force(table))
    assert found.alone == pytest.approx([mcnemar(list(column > 0), list(column < 0)) for column in table.T])


@pytest.mark.grid
def test_divergence_is_wrongly_told_of_any_arm_in_five_percent_at_most():
    rng = np.random.default_rng(3)
    for rate in (0.3, 0.5, 0.8):
        wrong = []
        for _ in range(400):
            diverged = (rng.random((8, 7)) < rate).astype(float)
            wrong.append(min(joint_pairs_test(diverged[:, 1:] - diverged[:, :1]).corrected) < 0.05)
        assert np.mean(wrong) < 0.05
