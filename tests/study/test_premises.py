"""Premises, margins and the and/or of claims: what must be true first, what counts as none, and what needs a
correction."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from study_analysis.test_claims import claimed, judged, noise, paired, study

from headwise.lab.experiments.premises import better_than_untrained, failure_arose, majority, memorised
from headwise.lab.experiments.premises import learned as learned_by
from headwise.lab.studies.registry import load_study
from headwise_verdict.results.analysis_record import JudgedClaim, JudgedTest
from headwise_verdict.results.claims import judge, judged_claims, judged_premises
from headwise_verdict.results.intervals import JointIntervals
from headwise_verdict.results.power import power_of
from headwise_verdict.results.records import Claim, ClaimTest, Premise

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def said(study_of, claims, premises=()):
    """Return the study with claims and premises, as its folder would."""
    import dataclasses

    record = study_of.study.model_copy(update={"claims": list(claims), "premises": list(premises)})
    return dataclasses.replace(study_of, study=record)


def learned(level: float, **more) -> Premise:
    test = {"arm": "baseline", "outcome": "test/accuracy", "says": "higher", "level": level} | more
    return Premise(name="learned", text="The baseline learned.", tests=(ClaimTest(**test),))


HELPS = Claim(text="It helps.", tests=(claimed("higher"),))


@pytest.mark.parametrize(("level", "state"), [(0.1, "holds"), (0.9, "fails"), (0.55, "not shown")])
def test_a_claim_whose_premise_was_not_shown_is_not_testable(level, state):
    found = said(paired(0.02, 0.01), [HELPS], [learned(level)])
    (premise,) = judged_premises(found)
    (claim,) = judged_claims(found)
    holds = state == "holds"
    assert premise.state == state and premise.holds is holds and "baseline 55.00" in premise.ours
    assert claim.verdict == ("as published" if holds else "not testable here")
    assert holds or claim.why.startswith("premise: The baseline learned. (test accuracy of baseline 55.00")


def test_a_claim_that_does_not_need_a_premise_is_judged_without_it():
    free = HELPS.model_copy(update={"needs": ()})
    verdicts = [claim.verdict for claim in judged_claims(said(paired(0.02, 0.01), [HELPS, free], [learned(0.9)]))]
    assert verdicts == ["not testable here", "as published"]


def test_an_arm_that_diverged_throughout_did_not_learn():
    """As with one run left of six, and not as if nothing were known."""
    figures = {"A()": [0.6, 0.61, 0.6, 0.62, 0.6, 0.61]}
    for base in (["diverged"] * 6, ["diverged"] * 5 + [0.5]):
        often = Claim(text="It diverges less.", tests=(claimed("lower", outcome="diverged"),))
        found = said(study({"baseline": base} | figures), [often], [learned(0.1)])
        assert judged_premises(found)[0].holds is False
        assert judged_claims(found)[0].verdict == "not testable here"
    # of an arm that ran, and whose kind of figure was not asked for, nothing is known
    found = said(study({"baseline": [0.5] * 6} | figures), [], [learned(0.1, outcome="test/loss")])
    assert judged_premises(found)[0].holds is None


def test_a_premise_that_no_run_recorded_is_not_known_and_hides_nothing():
    found = said(paired(0.02, 0.01), [HELPS], [learned(0.99, outcome="train/accuracy")])
    assert judged_premises(found)[0].holds is None and judged_claims(found)[0].verdict == "as published"


@pytest.mark.parametrize(("failures", "holds"), [(3, True), (2, False)])
def test_the_failure_arose_where_half_of_the_plain_runs_diverged(failures, holds):
    base = ["diverged"] * failures + [0.5] * (6 - failures)
    arose = Premise(name="arose", tests=(ClaimTest(arm="baseline", outcome="diverged", says="higher", level=0.5),))
    found = said(study({"baseline": base, "A()": [0.5] * 6}), [], [arose])
    (premise,) = judged_premises(found)
    # a share of these runs is not tested, so that no further seed would show it
    assert premise.holds is holds and premise.state == ("holds" if holds else "fails")


def test_beside_a_share_that_is_there_an_undecided_test_is_not_shown():
    often = ClaimTest(arm="A()", outcome="diverged", says="higher", level=0.2)
    undecided = ClaimTest(arm="baseline", outcome="test/accuracy", says="higher", level=0.55)
    figures = {"baseline": list(0.55 + 0.01 * noise(6)), "A()": ["diverged"] * 2 + [0.5] * 4}
    for tests, state in (((often,), "holds"), ((often, undecided), "not shown")):
        (premise,) = judged_premises(said(study(figures), [], [Premise(name="both", tests=tests)]))
        assert premise.state == state


def test_all_parts_of_a_claim_at_five_percent_need_no_correction():
    # eight arms, each with p 0.031 by itself
    base = 0.5 + 0.001 * noise(6)
    arms = {f"A{at}()": base + 0.01 + 0.002 * np.roll(noise(6), at) for at in range(8)}
    arms["A3()"] = base + 0.01 + 0.006 * noise(6)
    made = study({"baseline": list(base)} | {arm: list(values) for arm, values in arms.items()})
    found = judged(made, *(claimed("higher", arm=arm) for arm in arms))
    assert found.verdict == "as published", found.why
    assert all(test.p < 0.05 and test.low > 0 for test in found.tests)


def test_a_margin_wider_than_an_effect_told_on_the_page_shows_nothing():
    base = np.linspace(0.5, 0.6, 10)
    arms = {"A()": base + 0.01 + 0.002 * noise(10), "B()": base + 0.001 * noise(10)[::-1]}
    made = study({"baseline": list(base)} | {arm: list(values) for arm, values in arms.items()})
    idle = [Claim(text=f"{m}", tests=(claimed("same", arm="B()", margin=m),)) for m in (0.008, 0.015)]
    narrow, wide = judged_claims(said(made, idle))
    assert narrow.verdict == wide.verdict == "as published"
    _, narrow, wide = judged_claims(said(made, [HELPS, *idle]))
    assert narrow.verdict == "as published" and wide.verdict == "margin too wide"
    assert wide.verdict_words == "margin too wide: ±1.50 points" and wide.seeds_needed is None
    assert "±1.50 points is wider than the 1.00 points of A(), reported as an effect here" in wide.why


def test_a_default_margin_that_is_refused_is_said_to_be():
    base = np.linspace(0.5, 0.6, 10)
    arms = {"A()": base + 0.01 + 0.002 * noise(10), "B()": base + 0.001 * noise(10)[::-1]}
    made = study({"baseline": list(base)} | {arm: list(values) for arm, values in arms.items()})
    open_ = Claim(text="B helps.", tests=(claimed("higher", arm="B()", effect=0.04),))
    assert judged_claims(said(made, [open_]))[0].verdict == "no effect"
    _, wide = judged_claims(said(made, [HELPS, open_]))
    assert wide.verdict == "undecided" and "the margin ±2.00 points is wider than the 1.00 points of A()" in wide.why


def test_a_difference_that_is_the_published_one_is_neither_larger_nor_smaller():
    # 0.51 - 0.5 is more than 0.01 in floating point
    made = study({"baseline": [0.5] * 8, "A()": [0.51] * 8})
    assert judged(made, claimed("higher", effect=0.01)).verdict == "as published"
    assert judged(made, claimed("higher", effect=0.0101)).verdict == "same direction, smaller"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"verdict": "undecided", "seeds_needed": 14}, "undecided (14 seeds would do)"),
        ({"verdict": "undecided", "seeds_needed": 101}, "undecided: change the setting"),
        ({"verdict": "undecided"}, "undecided"),
        ({"verdict": "no effect", "within": "±0.50 points"}, "no effect within ±0.50 points"),
    ],
)
def test_a_verdict_says_its_margin_or_its_seeds(given, words):
    assert JudgedClaim(text="?", **given).verdict_words == words


def test_no_effect_is_told_within_half_of_the_published_one_by_default():
    found = judged(paired(0.0005, 0.002), claimed("higher", effect=0.01))
    assert (found.verdict, found.within) == ("no effect", "±0.50 points")
    own = judged(paired(0.0005, 0.002), claimed("higher", effect=0.01, margin=0.001))
    assert own.verdict == "undecided"


@pytest.mark.grid
def test_a_claim_is_wrongly_contradicted_in_five_percent_at_most():
    rng, wrong = np.random.default_rng(0), []
    for _ in range(150):
        runs = rng.normal(size=(8, 7))
        figures = {name: list(runs[:, at]) for at, name in enumerate(["baseline", *"ABCDEF"])}
        claim = Claim(text="?", tests=tuple(claimed("higher", arm=arm) for arm in "ABCDEF"))
        wrong.append(judge(study(figures), claim).verdict == "contrary")
    assert np.mean(wrong) < 0.08


@pytest.mark.parametrize("seeds", [6, 8, 10])
def test_an_effect_is_seen_with_the_power_that_its_test_has(seeds):
    drawn = np.random.default_rng(seeds).normal(1.2, 1, (400, seeds, 1))
    seen = [JointIntervals(table).p_zero()[0] < 0.05 for table in drawn]
    # six seeds decide when all differences have one sign; more come near to Student's t
    signs = stats.norm.cdf(1.2) ** 6 + stats.norm.cdf(-1.2) ** 6
    wanted = signs if seeds == 6 else power_of(1.2, seeds, stats.t.ppf(0.975, seeds - 1))
    assert np.mean(seen) == pytest.approx(wanted, abs=0.07)


@pytest.mark.grid
def test_the_interval_of_the_effect_ratio_holds_the_true_one():
    rng, held = np.random.default_rng(1), []
    for _ in range(250):
        (found,) = JointIntervals(rng.normal(0.6, 0.5, (10, 1))).bounds(0.05)
        test = JudgedTest(
            arm="A()", outcome="test/loss", says="lower", effect=-0.8, mean=-0.6, low=-found.high, high=-found.low
        )
        _, low, high = test.ratio
        held.append(low <= 0.6 / 0.8 <= high)
    assert np.mean(held) == pytest.approx(0.95, abs=0.04)


def test_the_majority_predicts_with_the_frequencies_of_the_training_classes():
    accuracy, loss = majority([0, 0, 0, 1], [0, 1, 1, 0, 2])
    # class 2 was not seen, and counts as once
    assert (accuracy, loss) == (0.4, pytest.approx(-(2 * np.log(0.75) + 3 * np.log(0.25)) / 5))


@pytest.mark.parametrize(
    ("premise", "holds"),
    [
        (learned_by("test/accuracy", 0.1, 0.4), True),
        (learned_by("test/accuracy", 0.1, 0.5), False),
        (learned_by("test/accuracy", 0.9, 0.1, arm="A()", lower=True), True),
        (memorised("test/accuracy"), False),
        (failure_arose(), False),
        (better_than_untrained("test/accuracy", 0.5, 0.01), True),
        (better_than_untrained("test/accuracy", "A()"), False),
        (better_than_untrained("test/accuracy", "baseline", arm="A()"), True),
        (better_than_untrained("test/accuracy", "A()", lower=True), True),
        (better_than_untrained("test/accuracy", 0.7, 0.04, lower=True), True),
        (better_than_untrained("test/accuracy", 0.6, 0.06, lower=True), False),
    ],
)
def test_the_common_premises_are_shown_or_not(premise, holds):
    assert judged_premises(said(paired(0.02, 0.01), [], [premise]))[0].holds is holds


def test_an_amount_beside_an_untrained_arm_is_refused_instead_of_dropped():
    with pytest.raises(ValueError, match=r"by=0.05 needs a figure for untrained, not an arm, here 'A\(\)'"):
        better_than_untrained("test/accuracy", "A()", 0.05)


def test_every_kept_study_that_trains_says_what_its_claims_rest_on():
    """A study of findings trains nothing; the other keep their analysis."""
    silent, judged_though = [], []
    for path in sorted(RESULTS.glob("*/claims.json")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        if not (path.parent / "analysis.json").is_file():
            continue
        silent += [] if kept.get("premises") else [path.parent.name]
        failed = {one["name"] for one in kept.get("premises", []) if one["holds"] is False}
        for claim, told in zip(load_study(path.parent.name).STUDY.claims, kept["claims"], strict=True):
            lost = failed if claim.needs is None else failed & set(claim.needs)
            judged_though += [told["text"]] if lost and told["verdict"] != "not testable here" else []
    assert (silent, judged_though) == ([], [])


def test_a_lower_loss_of_models_worse_than_chance_is_no_finding():
    """The loss of guessing among a hundred classes is ln 100; the dropout methods end there or above."""
    kept = json.loads((RESULTS / "blog-cifar100" / "claims.json").read_text(encoding="utf-8"))
    (claim,) = [one for one in kept["claims"] if "much lower test loss" in one["text"]]
    assert claim["verdict"] == "not testable here" and "trivial predictor, 4.605 nats" in claim["why"]


def test_an_arm_that_diverges_as_rarely_has_no_effect_within_half_of_the_published_one():
    made = study({"baseline": [0.5] * 8, "A()": [0.6] * 8})
    (test,) = judged(made, claimed("higher", outcome="diverged", effect=1.0)).tests
    assert (test.verdict, test.why) == ("no effect", "within ±50.00 points")
    # the exact one-sided bound of none in eight is 31 %
    assert pytest.approx(0.312, abs=1e-3) == 1 - 0.05 ** (1 / 8)
    assert judged(made, claimed("higher", outcome="diverged", effect=0.6)).verdict == "undecided"
