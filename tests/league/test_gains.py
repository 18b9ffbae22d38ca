"""The statistics of a league, against values worked out by hand and against what simulated leagues really are."""

import numpy as np
import pytest
from headwise_papers.league.gains import (
    LEVELS,
    Aggregate,
    Estimate,
    Figures,
    Worlds,
    interquartile_mean,
    probability_of_improvement,
    rank_correlation,
    ranks_of,
)
from headwise_papers.league.tables import ordered
from scipy import stats

NAN = float("nan")


def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end():
    assert interquartile_mean(np.array([100.0, 1, 2, 3, 4, 5, 6, -50])) == pytest.approx((2 + 3 + 4 + 5) / 4)
    drawn = np.random.default_rng(0).normal(size=(5, 23))
    assert interquartile_mean(drawn) == pytest.approx(stats.trim_mean(drawn, 0.25, axis=1))


def test_the_interquartile_mean_counts_what_is_there():
    rows = np.array([[1.0, 2, 3, NAN], [NAN] * 4])
    found = interquartile_mean(rows)
    assert found[0] == 2 and np.isnan(found[1])


def test_the_probability_of_improvement_counts_pairs_and_halves_of_equal_ones():
    ours, plain = np.array([[3.0, 1.0], [0.0, NAN]]), np.array([1.0, 2.0])
    # 3 beats both, 1 equals one and loses to the other; 0 loses to both
    assert probability_of_improvement(ours, plain) == pytest.approx([2.5 / 4, 0.0])
    drawn = np.random.default_rng(1).normal(size=(2, 9))
    whole = stats.mannwhitneyu(drawn[0], drawn[1]).statistic / 81
    assert probability_of_improvement(drawn[0], drawn[1]) == pytest.approx(whole)


def test_ranks_begin_with_the_highest_and_missing_ones_have_none():
    found = ranks_of(np.array([0.5, NAN, 2.0, 0.5]))
    assert found[[0, 2, 3]] == pytest.approx([2.5, 1, 2.5]) and np.isnan(found[1])


def test_the_rank_correlation_is_spearmans_over_what_both_have():
    one, other = np.array([1.0, 2, 3, 4, NAN]), np.array([10.0, 30, 20, 40, 5])
    assert (
        rank_correlation(one, other)
        == pytest.approx(stats.spearmanr(one[:4], other[:4]).statistic)
        == pytest.approx(0.8)
    )
    assert np.isnan(rank_correlation(one[:2], other[:2])) and np.isnan(rank_correlation(one[:4], np.ones(4)))


def two_worlds():
    first = Figures(
        "first", np.array([0.0, 1, 2, 3]), {"good": np.array([2.0, 3, 4, 5]), "bad": np.array([-1.0, 0, 1, 2])}
    )
    second = Figures(
        "second",
        np.array([10.0, 20, 30, 40]),
        {"good": np.array([20.0, 30, 40, 50]), "other": np.array([10.0, 20, 30, 40])},
    )
    return [first, second]


def test_aggregates_worked_out_by_hand():
    worlds = Worlds(two_worlds())
    found, unit = worlds.aggregates(), np.std([0, 1, 2, 3], ddof=1)
    # eight gains, two spreads of one and one of the other: the middle half of 2, 2, 2, 2, 1, 1, 1, 1
    assert found["good"].worlds == 2 and found["good"].gain.value == pytest.approx(1.5 / unit)
    assert found["bad"].worlds == found["other"].worlds == 1
    assert found["bad"].gain.value == pytest.approx(-1 / unit) and found["other"].gain.value == 0
    # of 16 pairs, run by run of good: 2 beats 0 and 1 and equals 2, and so on; equal ones count half
    first = (2.5 + 3.5 + 4 + 4) / 16
    second = (1.5 + 2.5 + 3.5 + 4) / 16
    assert found["good"].improvement.value == pytest.approx((first + second) / 2)
    assert found["good"].rank.value == 1 and found["bad"].rank.value == found["other"].rank.value == 2
    # 2 / 1.29 = 1.55 and 1 / 1.29 = 0.77 spreads
    profile = dict(zip(LEVELS, (point.value for point in found["good"].profile)))
    assert (profile[0.5], profile[1.0], profile[1.5], profile[2.0]) == (1.0, 0.5, 0.5, 0.0)
    # every seed gains alike: resampling pairs moves nothing as long as the unit stays
    assert found["bad"].gain.low == pytest.approx(found["bad"].gain.high)
    assert worlds.mean_gains()["second"] == {"good": pytest.approx(1 / unit), "bad": None, "other": 0.0}


def test_a_world_whose_plain_runs_are_equal_sets_no_unit_and_is_named():
    flat = Figures("flat", np.ones(4), {"good": np.zeros(4)})
    worlds = Worlds([*two_worlds(), flat])
    assert worlds.left_out == ["flat"] and worlds.aggregates()["good"].worlds == 2
    assert Worlds([flat]).aggregates() == {} and Worlds([flat]).left_out_each() == {}


def test_an_entry_that_misses_a_world_comes_last_whatever_it_gained():
    full, short = (
        Aggregate(worlds, Estimate(gain), *[Estimate(None)] * 2, ()) for worlds, gain in ((3, 0.1), (1, 9.0))
    )
    assert ordered({"short": short, "full": full}) == ["full", "short"]


def test_a_missing_seed_leaves_its_pair_out_and_the_others_in():
    world = Figures("one", np.array([0.0, 1, 2, NAN]), {"good": np.array([1.0, NAN, 3, 4])})
    assert Worlds([world]).aggregates()["good"].gain.value == pytest.approx(1.0)


def simulated(rng, gains, seeds=8, noise=0.5):
    """Return a league of worlds in which entries really gain `gains` (entries × worlds) spreads of the plain model."""
    worlds = []
    for at, column in enumerate(np.asarray(gains, dtype=float).T):
        plain = rng.normal(size=seeds)
        entries = {f"e{row}": plain + gain + noise * rng.normal(size=seeds) for row, gain in enumerate(column)}
        worlds.append(Figures(f"w{at}", plain, entries))
    return worlds


@pytest.mark.grid
def test_intervals_of_gains_cover_what_is_true(monkeypatch):
    """In units that are known, the interval of a gain holds the truth about as often as it says."""
    monkeypatch.setattr("headwise_papers.league.gains.RESAMPLES", 120)
    monkeypatch.setattr(Figures, "spread", property(lambda world: 1.0))
    rng, held = np.random.default_rng(0), []
    for _ in range(40):
        found = Worlds(simulated(rng, [[0.8] * 5, [0.0] * 5])).aggregates()
        held += [found[name].gain.low <= true <= found[name].gain.high for name, true in (("e0", 0.8), ("e1", 0.0))]
    # 80 intervals of nominal 95 %; percentiles of 8 seeds a world are a little narrow
    assert 0.82 <= np.mean(held) <= 1.0
    # and one that moved by a spread would be missed: the check can fail
    assert not found["e0"].gain.low <= 1.8 <= found["e0"].gain.high


def test_leaving_a_world_out_tells_whether_worlds_agree(monkeypatch):
    monkeypatch.setattr("headwise_papers.league.gains.RESAMPLES", 200)
    rng, levels = np.random.default_rng(3), np.linspace(-2, 2, 10)
    alike = Worlds(simulated(rng, np.tile(levels, (4, 1)).T)).left_out_each()
    assert list(alike) == ["w0", "w1", "w2", "w3", "mean"]
    assert alike["mean"].value > 0.9 and alike["mean"].low > 0.7
    opposed = np.tile(levels, (4, 1)).T
    opposed[:, 2] *= -1
    found = Worlds(simulated(rng, opposed)).left_out_each()
    assert found["w2"].value < -0.9 and found["w2"].high < 0 < found["w0"].value
