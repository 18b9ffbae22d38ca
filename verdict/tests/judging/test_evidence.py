"""The evidence of a judgement: its closed form, its error under looking after every seed, and the decisions from it."""

import math
import random
from pathlib import Path

import numpy as np
import pytest
from scipy import integrate, stats

from headwise_verdict.judging.decision import ACCEPT, CODES, EQUIVALENT, GO_ON, REJECT, UNDECIDED, Rule, judge
from headwise_verdict.judging.evidence import (
    EFFECT,
    Sample,
    against_floor,
    autocorrelation,
    e_value,
    half_width,
    interval,
    paired,
)


def by_integration(differences, null=0.0):
    """The ratio of marginal likelihoods by quadrature over the spread and the effect size."""
    d = np.asarray(differences) - null
    n = len(d)

    def likelihood(log_spread, effect):
        spread = math.exp(log_spread)
        return math.exp(-n * log_spread - ((d - effect * spread) ** 2).sum() / (2 * spread**2))

    def alternative(effect):
        prior = math.exp(-0.5 * (effect / EFFECT) ** 2) / (EFFECT * math.sqrt(2 * math.pi))
        return prior * integrate.quad(likelihood, -8, 8, args=(effect,), limit=200)[0]

    return (
        integrate.quad(alternative, -12, 12, limit=200)[0]
        / integrate.quad(likelihood, -8, 8, args=(0.0,), limit=200)[0]
    )


@pytest.mark.parametrize("differences", [[0.3, 0.9, -0.2], [1.0, 1.2, 0.7, 1.4, 0.9], [-0.1, 0.2, 0.1, -0.3]])
def test_the_e_value_is_the_ratio_of_marginal_likelihoods(differences):
    assert e_value(paired(differences)) == pytest.approx(by_integration(differences), rel=1e-4)
    assert e_value(paired(differences), 0.5) == pytest.approx(by_integration(differences, 0.5), rel=1e-4)


@pytest.mark.parametrize("alpha", [0.05, 0.01])
@pytest.mark.parametrize("n", [4, 7, 30])
def test_the_interval_holds_all_means_with_less_evidence(n, alpha):
    rng = random.Random(n)
    sample = paired([rng.gauss(0.5, 1.0) for _ in range(n)])
    half = half_width(sample, alpha)
    if math.isfinite(half):
        assert e_value(sample, sample.mean + half) == pytest.approx(1 / alpha, rel=1e-9)
        assert e_value(sample, sample.mean - 0.99 * half) < 1 / alpha
    floor = against_floor([1.0] * n, 0.0, 1.0, 8)
    assert e_value(floor, floor.mean - half_width(floor, alpha)) == pytest.approx(1 / alpha, rel=1e-9)


def test_shift_and_scale_change_nothing_but_themselves():
    d = [0.3, 0.9, -0.2, 0.5]
    assert e_value(paired([7 * x for x in d])) == pytest.approx(e_value(paired(d)), rel=1e-12)
    assert e_value(paired([x + 2 for x in d]), 2.0) == pytest.approx(e_value(paired(d)), rel=1e-9)


def test_before_a_spread_is_known_there_is_no_evidence():
    assert e_value(paired([3.0])) == 1 and half_width(paired([3.0]), 0.05) == math.inf
    # the limit of small spreads: no evidence is infinite
    assert e_value(Sample(0.1, 0.0, 3, 2)) == pytest.approx(13) == e_value(Sample(0.1, 1e-9, 3, 2))
    assert e_value(Sample(0.0, 0.0, 3, 2)) == 1
    assert interval([paired([3.0])], 0.05) == (-math.inf, math.inf)


def first_hits(differences, alpha=0.05):
    """Whether the evidence of each row reaches 1/alpha at any look, and in which direction."""
    n = np.arange(1, differences.shape[1] + 1)
    mean = differences.cumsum(1) / n
    squares = np.maximum((differences**2).cumsum(1) - n * mean**2, 1e-300)
    wide, nu = 1 + n * EFFECT**2, np.maximum(n - 1, 1)
    x = n * mean**2 / squares
    log = -0.5 * np.log(wide) + n / 2 * (np.log1p(x) - np.log1p(x / wide))
    log[:, 0] = 0.0
    hit = log >= math.log(1 / alpha)
    assert nu[0] == 1
    return hit.any(1), (hit & (mean > 0)).any(1)


NOISE = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "student 3": lambda rng, shape: rng.standard_t(3, size=shape),
    "log-normal": lambda rng, shape: np.exp(rng.normal(size=shape)),
    "a run in ten fails": lambda rng, shape: (rng.random(shape) < 0.1) + 1e-3 * rng.normal(size=shape),
}


@pytest.mark.parametrize("kind", NOISE)
def test_without_a_difference_a_look_after_every_seed_errs_less_often_than_stated(kind):
    rng = np.random.default_rng(0)
    noise = NOISE[kind](rng, (8000, 2, 60))
    wrong, accepted = first_hits(noise[:, 0] - noise[:, 1])
    assert wrong.mean() < 0.05 and accepted.mean() < 0.025
    # the same by the function itself, on some of them
    found = [judge(row, Rule(higher=True, budget=60)).answer for row in (noise[:60, 0] - noise[:60, 1])]
    assert [answer in (ACCEPT, REJECT) for answer in found] == wrong[:60].tolist()


def test_a_t_test_after_every_seed_errs_far_more_often():
    rng = np.random.default_rng(0)
    d = rng.normal(size=(2000, 60))
    p = np.stack([stats.ttest_1samp(d[:, :n], 0, axis=1).pvalue for n in range(3, 61)])
    assert (p < 0.05).any(0).mean() > 0.25


def test_the_answers_and_their_codes():
    rng = random.Random(0)
    lower = [-1 + 0.1 * rng.gauss(0, 1) for _ in range(8)]
    found = judge(iter(lower), Rule(margin=0.2))
    assert found.answer == ACCEPT and found.code == 0 and found.high < 0 and found.pairs < 8 and found.more is None
    assert judge(lower, Rule(higher=True)).answer == REJECT and CODES[REJECT] == 1
    none = [0.1 * rng.gauss(0, 1) for _ in range(40)]
    assert judge(none, Rule(margin=0.2)).answer == EQUIVALENT
    assert judge(none[:5]).answer == GO_ON
    assert judge(none[:5], Rule(budget=5)).answer == UNDECIDED
    assert judge(none[:3], Rule(margin=0.2)).more > 0


def test_a_forecast_is_what_it_takes_if_nothing_changes():
    sample = paired([0.4, 0.9, 0.2])
    more = judge([0.4, 0.9, 0.2], Rule(higher=True)).more
    for further, decided in ((more - 1, False), (more, True)):
        then = Sample(sample.mean, sample.spread, 3 + further, 2 + further)
        assert (sample.mean - half_width(then, 0.05) > 0) is decided


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"margin": -1.0}, "margin"),
        ({"alpha": 0.0}, "alpha"),
        ({"budget": 0}, "budget"),
        ({"margin": math.nan}, "margin"),
    ],
)
def test_a_rule_without_meaning_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Rule(**settings)


def test_what_cannot_be_judged_is_refused():
    with pytest.raises(ValueError, match="no pair"):
        judge([])
    with pytest.raises(ValueError, match="pair 2 has the difference nan"):
        judge([0.1, math.nan])


def test_differences_that_depend_on_those_before_are_told():
    rng = np.random.default_rng(0)
    wandering = rng.normal(size=40).cumsum()
    (note,) = judge(wandering - wandering.mean(), Rule(alpha=1e-9)).notes
    assert "Draw at random, for each pair" in note
    alternating = [0.1 * (-1) ** n for n in range(20)]
    assert judge(alternating).notes == () and judge(wandering[:7], Rule(alpha=1e-9)).notes == ()
    told = [autocorrelation(row) is not None for row in rng.normal(size=(2000, 12))]
    assert 0.02 < np.mean(told) < 0.07


def test_the_simulations_of_the_page_follow_the_same_decisions(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "docs")
    import judge_simulations

    rng = np.random.default_rng(1)
    differences = rng.normal(size=(60, 14)) + rng.normal(size=(60, 1))
    signs = {ACCEPT: 1, REJECT: -1}
    for level in (0.05, 0.3):
        mine = [signs.get(judge(row, Rule(higher=True, alpha=level)).answer, 0) for row in differences]
        assert judge_simulations.looks(differences).answers(level).tolist() == mine
        assert len(set(mine)) == 3
    found = judge_simulations.bets(np.clip(differences, -2, 2), 2.0).answers()
    mine = [signs.get(judge(row, Rule(higher=True, bound=2.0)).answer, 0) for row in np.clip(differences, -2, 2)]
    assert found.tolist() == mine and len(set(mine)) == 3
    looks = judge_simulations.by_floor(differences[:, :5] + 1, differences[:, 5:])
    for before, after, log in zip(differences[:, :5] + 1, differences[:, 5:], looks.log):
        floor = [against_floor(after[:n], before.mean(), before.std(ddof=1), 5) for n in range(1, 10)]
        assert np.exp(log) == pytest.approx([e_value(sample) for sample in floor])
    noise = judge_simulations.autocorrelated(rng, 0.6, 20000, 10)
    assert np.mean(noise[:, 1:] * noise[:, :-1]) == pytest.approx(0.6, abs=0.02)


@pytest.mark.parametrize("unit", [1e-200, 1.0, 1e200])
def test_the_unit_of_a_metric_changes_no_evidence(unit):
    found = [judge([unit * d for d in DIFFERENCES[:count]]) for count in range(1, 9)]
    plain = [judge(DIFFERENCES[:count]) for count in range(1, 9)]
    assert [one.answer for one in found] == [one.answer for one in plain]
    assert [one.evidence for one in found] == pytest.approx([one.evidence for one in plain], rel=1e-9)


DIFFERENCES = [-1.2, 0.9, -1.5, 0.3, -1.1, 0.8, -1.3, 0.2]


def test_a_forecast_from_one_pair_is_the_least_that_any_pairs_take():
    assert judge([-0.1]).more == 3
    assert judge([-0.1] * 3).answer == "go on" and judge([-0.1] * 4).answer == "accept"
