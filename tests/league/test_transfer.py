"""Means over worlds agree with a library, and only what carries over is advised."""

import statistics

import pytest
from headwise_papers.league.transfer import Gain, Standing, advice, gain_of, pooled, turns
from scipy import stats


def test_the_mean_over_worlds_is_students_of_scipy():
    means = [0.3, -0.1, 0.25, 0.0]
    found = pooled([Gain(mean, mean, mean, 1e-4) for mean in means])
    reference = stats.ttest_1samp(means, 0.0).confidence_interval()
    assert found.mean == pytest.approx(0.1125)
    assert (found.low, found.high) == pytest.approx((reference.low, reference.high))
    # t with 3 degrees of freedom; a new world varies as those seen, beside the error of their mean
    wide = 3.182446 * statistics.stdev(means) * (1 + 1 / 4) ** 0.5
    assert (found.new_low, found.new_high) == pytest.approx((found.mean - wide, found.mean + wide), rel=1e-6)
    assert found.tau2 == pytest.approx(statistics.variance(means) - 1e-4)


def test_a_world_known_exactly_does_not_stand_for_all():
    found = pooled([Gain(0.0, 0.0, 0.0, 0.0), Gain(0.5, 0.1, 0.9, 0.04), Gain(0.4, 0.2, 0.6, 0.01)])
    assert found.mean == pytest.approx(0.3) and found.high > 0.5 and found.new_low < 0 < found.new_high


def test_equal_worlds_have_no_variance_between_them_and_still_an_interval():
    found = pooled([Gain(0.2, 0.1, 0.3, 0.01)] * 3)
    assert found.tau2 == 0 and found.mean == pytest.approx(0.2)
    # t with 2 degrees of freedom times 0.1 / √3, and times 0.1 √(4 / 3)
    assert found.high - found.mean == pytest.approx(4.302653 * 0.1 / 3**0.5, rel=1e-6)
    assert found.new_high - found.mean == pytest.approx(4.302653 * 0.1 * (4 / 3) ** 0.5, rel=1e-6)


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
