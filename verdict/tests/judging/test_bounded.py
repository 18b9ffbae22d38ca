"""Evidence from bounded differences of any distribution."""

import itertools
import math

import numpy as np
import pytest

from headwise_verdict.files.errors import StudyError
from headwise_verdict.judging.bounded import SHARES, Bets
from headwise_verdict.judging.decision import ACCEPT, EQUIVALENT, GO_ON, REJECT, Rule, judge, of_differences

RNG = np.random.default_rng(0)


def wealth(differences, null, bound):
    """The mean wealth of eight gamblers on differences above `null`, written as products."""
    return np.mean([math.prod(1 + c * (d - null) / (null + bound) for d in differences) for c in SHARES])


def test_wealth_is_fair_whatever_the_distribution():
    # all sequences of four differences from a skewed distribution on three points, of mean `null`
    points, chances = (-1.0, 0.25, 0.5), (0.2, 0.5, 0.3)
    null = sum(p * d for p, d in zip(chances, points))
    expected = 0.0
    for drawn in itertools.product(range(3), repeat=4):
        bets = Bets(1.0, 0.05)
        for one in drawn:
            bets.add(points[one])
        both = [np.mean(np.exp(bets.logs(null, up=up))) for up in (True, False)]
        assert both[0] == pytest.approx(wealth([points[one] for one in drawn], null, 1.0))
        expected += math.prod(chances[one] for one in drawn) * np.array(both)
    assert expected == pytest.approx([1.0, 1.0])


def test_the_interval_holds_all_means_with_less_evidence_at_every_look():
    bets, seen = Bets(1.0, 0.1), []
    low, high = -1.0, 1.0
    grid = np.linspace(-0.999, 0.999, 400)
    for difference in np.clip(0.3 + 0.2 * RNG.normal(size=25), -1, 1):
        bets.add(difference)
        seen.append(difference)
        inside = [
            m
            for m in grid
            if wealth(seen, m, 1.0) < 20 and wealth([-d for d in seen], -m, 1.0) < 20 and low <= m <= high
        ]
        low, high = max(low, min(inside) - 0.0051), min(high, max(inside) + 0.0051)
        assert bets.low == pytest.approx(low, abs=0.011) and bets.high == pytest.approx(high, abs=0.011)
        assert (bets.low > 0) == (bets.evidence >= 10)
    assert bets.low > 0


@pytest.mark.parametrize("chance", [0.02, 0.1, 0.5])
def test_a_candidate_that_alone_fails_is_accepted_no_more_often_than_stated(chance):
    rng = np.random.default_rng(1)
    differences = chance - (rng.random((40, 30)) < chance) + 1e-4 * rng.normal(size=(40, 30))
    plain = np.mean([judge(iter(row), Rule(higher=True)).answer == ACCEPT for row in differences])
    bound = np.mean([judge(iter(row), Rule(higher=True, bound=1.0)).answer in (ACCEPT, REJECT) for row in differences])
    assert bound <= 0.05 and (plain > 0.5) == (chance < 0.5)


def test_the_answers_within_a_bound():
    gains = list(np.clip(0.4 + 0.1 * RNG.normal(size=40), -1, 1))
    accepted = judge(iter(gains), Rule(higher=True, bound=1.0))
    assert accepted.answer == ACCEPT and 9 < accepted.pairs < 25 and accepted.low > 0 and accepted.evidence >= 20
    assert judge(iter(gains), Rule(bound=1.0)).answer == REJECT
    small = list(0.01 * RNG.normal(size=60))
    assert judge(iter(small), Rule(margin=0.3, bound=1.0)).answer == EQUIVALENT
    first = of_differences(gains[:8], Rule(higher=True, bound=1.0))
    assert first.answer == GO_ON and abs(8 + first.more - accepted.pairs) <= 3
    # what was excluded stays excluded
    assert of_differences([*gains, *[-0.5] * 9], Rule(higher=True, bound=1.0)).low >= accepted.low
    # ends that exclude each other leave the last look alone
    both = of_differences([*[0.9] * 30, *[-0.9] * 90], Rule(alpha=0.5, bound=1.0))
    assert both.low < -0.3 < both.high


def test_a_bound_that_is_none_is_refused():
    with pytest.raises(StudyError, match=r"pair 2 differs by -0\.7, more than the bound 0\.5, which is too small"):
        judge([0.1, -0.7], Rule(bound=0.5))
    for bound in (0.0, -1.0, 0.2, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"bound must be a number above the margin, 0\.2"):
            Rule(margin=0.2, bound=bound)
    with pytest.raises(TypeError, match="bound must be a number"):
        Rule(bound="1")
