"""The critical learning rate of a sweep: by hand, in the analysis, as what a claim is of, and in the report."""

from __future__ import annotations

import itertools
import math

import pytest
from study_analysis.test_claims import study

from headwise_verdict.reporting.difference_section import axis_sections
from headwise_verdict.results.analysis import analyse_study
from headwise_verdict.results.claims import judge
from headwise_verdict.results.critical_rates import critical_rate, critical_rates
from headwise_verdict.results.records import AxisRecord, Claim, ClaimTest

RATES = [0.001, 0.01, 0.1]


def axis(method: str, name: str = "learning_rate") -> AxisRecord:
    arms = [f"{method} | {name}={rate:g}" for rate in RATES]
    return AxisRecord(name=name, values=RATES, arms=arms, text=f"{method} | {name}={{0.001,0.01,0.1}}")


PLAIN, SIGMA = axis("baseline"), axis("SigmaReparam()")


def swept(plain: list[int], sigma: list[int], axes=(PLAIN, SIGMA)):
    """A study in which every seed diverges from so many rates on: 3 where it never does."""
    figures = {"baseline": [0.5] * len(plain)}
    for one, first in zip(axes, (plain, sigma)):
        for at, arm in enumerate(one.arms):
            figures[arm] = ["diverged" if at >= begins else 0.5 for begins in first]
    return study(figures, axes=axes)


def claim(**more) -> Claim:
    test = {"arm": SIGMA.text, "against": PLAIN.text, "outcome": "critical_rate", "says": "higher"} | more
    return Claim(text="It bears a higher rate.", tests=(ClaimTest(**test),))


@pytest.mark.parametrize("diverged", list(itertools.product((0.0, 1.0, None), repeat=3)))
def test_a_critical_rate_is_what_reading_the_axis_by_hand_gives(diverged):
    found = critical_rate(RATES, list(diverged))
    first = next((at for at, one in enumerate(diverged) if one != 0.0), None)
    if first is None:
        assert found == pytest.approx(-1)
    elif diverged[first] is None:
        assert math.isnan(found)
    else:
        assert found == pytest.approx((-3, -2.5, -1.5)[first])


def test_a_sweep_of_rates_gives_its_critical_rate_by_itself():
    plain, sigma = critical_rates(swept([1, 1, 1, 1, 2, 2, 2, 2], [2, 2, 3, 2, 3, 3, 3, 2]))
    assert (plain.axis, sigma.against) == (PLAIN.text, PLAIN.text)
    assert plain.mean == pytest.approx(-2) and sigma.mean == pytest.approx(-1.25)
    # of eight seeds seven rise and one stays: 2 of the 2⁷ ways to flip those that rise are as far from 0
    assert sigma.difference == pytest.approx(0.75) and sigma.p == pytest.approx(2 / 2**7)
    assert sigma.difference_low > 0 and sigma.pairs == 8


def test_a_claim_of_critical_rates_is_judged_in_pairs():
    found = judge(swept([1] * 6, [2] * 6), claim(effect=1.0))
    assert found.verdict == "as published" and found.tests[0].mean == pytest.approx(1)
    assert "critical learning rate (log10)" in found.ours and "decades" in found.ours
    assert judge(swept([2] * 6, [1] * 6), claim()).verdict == "contrary"
    assert judge(swept([1, 2] * 4, [2, 1] * 4), claim()).verdict == "undecided"
    assert judge(swept([2] * 8, [2] * 8), claim(says="same", margin=0.25)).verdict == "as published"
    alone = ClaimTest(arm=SIGMA.text, outcome="critical_rate", says="higher", level=-2)
    assert judge(swept([1] * 6, [2] * 6), Claim(text="?", tests=(alone,))).verdict == "as published"


def test_five_seeds_decide_nothing_however_far_the_rates_lie_apart():
    assert judge(swept([0] * 5, [3] * 5), claim()).verdict == "undecided"


def test_nothing_is_told_where_nothing_diverged_or_no_rate_was_swept():
    assert critical_rates(swept([3] * 6, [3] * 6)) == []
    decay = axis("baseline", "weight_decay")
    assert not decay.of_rates
    found = swept([1] * 6, [2] * 6, (decay, SIGMA))
    assert [one.axis for one in critical_rates(found)] == [SIGMA.text]
    told = judge(found, claim(against=decay.text))
    assert told.verdict == "not testable here" and "not of learning rates" in told.why


def test_a_missing_run_below_the_first_that_diverges_is_no_seed():
    found = swept([1] * 7, [2] * 7)
    del found.runs[SIGMA.arms[0], 3]
    _, sigma = critical_rates(found)
    assert sigma.n == 6 and "3" not in sigma.by_seed and sigma.pairs == 6


@pytest.mark.parametrize(
    "more", [{"says": "rises"}, {"against": "baseline"}, {"against_outcome": "test/loss"}, {"says": "inside"}]
)
def test_a_critical_rate_is_of_two_sweeps_or_of_a_sweep_and_a_level(more):
    with pytest.raises(ValueError, match="a critical rate needs a sweep of learning rates"):
        claim(**more)


def test_the_report_shows_rates_and_how_many_times_they_differ():
    found = swept([1] * 8, [2] * 7 + [3])
    sections = axis_sections(found, analyse_study(found))
    assert sections[-1].title == "Critical learning rate"
    html = str(sections[-1].body)
    assert "0.0032" in html and "SigmaReparam" in html
