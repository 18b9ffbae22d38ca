"""Means over worlds agree with a published meta-analysis, and only what carries over is advised."""

import math

import pytest
from headwise_papers.league.transfer import Gain, Standing, advice, gain_of, pooled, turns

# tuberculosis cases and others, vaccinated and not, of 13 trials: Colditz et al. 1994, the usual example
TRIALS = [
    (4, 119, 11, 128),
    (6, 300, 29, 274),
    (3, 228, 11, 209),
    (62, 13536, 248, 12619),
    (33, 5036, 47, 5761),
    (180, 1361, 372, 1079),
    (8, 2537, 10, 619),
    (505, 87886, 499, 87892),
    (29, 7470, 45, 7232),
    (17, 1699, 65, 1600),
    (186, 50448, 141, 27197),
    (5, 2493, 3, 2338),
    (27, 16886, 29, 17825),
]


def test_the_mean_over_worlds_is_that_of_a_known_meta_analysis():
    gains = []
    for a, b, c, d in TRIALS:
        mean, variance = math.log(a / (a + b) / (c / (c + d))), 1 / a - 1 / (a + b) + 1 / c - 1 / (c + d)
        gains.append(Gain(mean, mean, mean, variance))
    found = pooled(gains)
    # tau² and mean as published for DerSimonian and Laird; the interval of Hartung and Knapp as statsmodels gives it
    assert found.tau2 == pytest.approx(0.3088, abs=5e-5) and found.mean == pytest.approx(-0.7141, abs=5e-5)
    assert (found.low, found.high) == pytest.approx((-1.10782, -0.32041), abs=5e-6)
    assert found.new_low < found.low and found.new_high > 0 > found.high


def test_equal_worlds_have_no_variance_between_them_and_still_an_interval():
    found = pooled([Gain(0.2, 0.1, 0.3, 0.01)] * 3)
    assert found.tau2 == 0 and found.mean == pytest.approx(0.2)
    # t with 2 degrees of freedom times 0.1 / √3
    assert found.high - found.mean == pytest.approx(4.302653 * 0.1 / 3**0.5, rel=1e-6)
    assert found.new_high == found.high


def test_a_gain_is_the_share_of_errors_avoided_paired_by_seed():
    found = gain_of([0.1, 0.2, 0.3], [0.2, 0.3, 0.4])
    assert found.mean == pytest.approx(0.1 / 0.3) and found.variance == pytest.approx(0, abs=1e-12)
    worse = gain_of([0.5, 0.5], [0.4, 0.2])
    # differences −0.1 and −0.3, of a mean of 0.3; t with 1 degree of freedom
    assert worse.mean == pytest.approx(-0.2 / 0.3)
    assert worse.mean - worse.low == pytest.approx(12.7062 * 0.1 / 0.3, rel=1e-4)
    with pytest.raises(ValueError, match="no error"):
        gain_of([0.1, 0.1], [0.0, 0.0])


def standings(gains, control="decay", above=0.1):
    """Return worlds with these gains of each contestant, known to 0.01, and gains over the best control."""
    found = []
    for at in range(len(next(iter(gains.values())))):
        to_plain = {name: Gain(some[at], some[at] - 0.02, some[at] + 0.02, 1e-4) for name, some in gains.items()}
        to_control = {name: Gain(above, above - 0.02, above + 0.02, 1e-4) for name in gains if name != control}
        found.append(Standing(f"world {at}", to_plain, to_control, control))
    return found


def test_what_is_chosen_without_each_world_and_gains_there_is_to_be_tried_first():
    worlds = standings({"decay": [0.05] * 3, "drop-head": [0.2, 0.22, 0.24]})
    assert [turn.chosen for turn in turns(worlds)] == ["drop-head"] * 3 and all(turn.carried for turn in turns(worlds))
    assert advice(worlds)["drop-head"] == "try first"


@pytest.mark.parametrize("above", [0.01, -0.1])
def test_a_method_that_the_best_control_equals_is_a_candidate_at_most(above):
    worlds = standings({"decay": [0.05] * 3, "drop-head": [0.2, 0.22, 0.24]}, above=above)
    assert advice(worlds)["drop-head"] == "candidate"


def test_a_control_is_compared_with_no_control_where_it_is_the_best_one():
    worlds = standings({"decay": [0.2, 0.22, 0.24], "drop-head": [0.0] * 3})
    assert turns(worlds)[0].to_control is None and advice(worlds)["decay"] == "try first"


def test_a_choice_that_fails_in_one_world_transfers_nowhere():
    worlds = standings({"decay": [0.05] * 3, "drop-head": [0.5, 0.5, -0.2]})
    last = turns(worlds)[-1]
    assert (last.left_out, last.chosen, last.carried) == ("world 2", "drop-head", False)
    assert "drop-head" not in advice(worlds)


def test_nothing_is_advised_from_two_worlds():
    worlds = standings({"decay": [0.05] * 2, "drop-head": [0.2, 0.3]})
    assert turns(worlds) == [] and advice(worlds) == {}
