"""Claims: every verdict, from made-up results of which it is known."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from headwise_verdict.results.analysis_record import JudgedTest
from headwise_verdict.results.claim_tests import figures_in_words, reasons_in_words
from headwise_verdict.results.claims import Effect, judge, judged_claims
from headwise_verdict.results.folder import RunFolder, StudyFolder
from headwise_verdict.results.records import (
    AxisRecord,
    Claim,
    ClaimTest,
    Divergence,
    MetricRecord,
    RunResult,
    StudyRecord,
)

AXIS = AxisRecord(
    name="p", values=[0.1, 0.2, 0.3], arms=["A(p=0.1)", "A(p=0.2)", "A(p=0.3)"], text="A(p={0.1,0.2,0.3})"
)
# what a seed adds to a difference: mean 0
NOISE = np.random.default_rng(0).normal(size=64)


def noise(seeds: int) -> np.ndarray:
    part = NOISE[:seeds] - NOISE[:seeds].mean()
    return part / part.std(ddof=1)


def study(figures: dict[str, list[float | str | None]], *, margin=None, failure=None, axes=(), outcome="test/accuracy"):
    """Make a study of arms whose outcome in each seed is given; "diverged" for a run that did."""
    arms, seeds = list(figures), len(next(iter(figures.values())))
    metrics = [MetricRecord(name="accuracy", label="accuracy", higher_is_better=True, unit="%", failure=failure)]
    metrics.append(MetricRecord(name="loss", label="loss", higher_is_better=False, unit="nats"))
    record = StudyRecord(
        arms=arms,
        baseline="baseline",
        seeds=list(range(seeds)),
        primary="test/accuracy",
        metrics=metrics,
        margin=margin,
        axes=list(axes),
    )
    runs = {}
    for arm, values in figures.items():
        for seed, value in enumerate(values):
            if value is None:
                continue
            broken = value == "diverged"
            result = RunResult(
                status="diverged" if broken else "finished",
                arm=arm,
                seed=seed,
                hash="0",
                metrics={} if broken else {outcome: value},
                divergence=Divergence(step=3) if broken else None,
                format=2,
            )
            runs[arm, seed] = RunFolder(arm, seed, Path("run"), result)
    return StudyFolder(Path("study"), record, runs)


def paired(mean: float, spread: float, seeds: int = 10, **settings) -> StudyFolder:
    """Make a study of two arms whose differences have this mean and this standard deviation."""
    base = np.linspace(0.5, 0.6, seeds)
    return study({"baseline": list(base), "A()": list(base + mean + spread * noise(seeds))}, **settings)


def claimed(says, **more) -> ClaimTest:
    return ClaimTest(**{"arm": "A()", "outcome": "test/accuracy", "says": says} | more)


def judged(found: StudyFolder, *tests: ClaimTest):
    return judge(found, Claim(text="It helps.", source="somebody", tests=tests))


@pytest.mark.parametrize(
    ("mean", "spread", "says", "effect", "verdict", "why"),
    [
        (0.02, 0.01, "higher", None, "as published", ""),
        (-0.02, 0.01, "lower", None, "as published", ""),
        (0.02, 0.01, "lower", None, "contrary", "of the other sign"),
        (-0.02, 0.01, "higher", 0.01, "contrary", "of the other sign"),
        # half of the published effect is the margin
        (0.001, 0.01, "higher", 0.05, "no effect", "within ±2.50 points"),
        (-0.001, 0.01, "lower", -0.05, "no effect", "within ±2.50 points"),
        # there, but less than was published
        (0.02, 0.01, "higher", 0.10, "same direction, smaller", "smaller than the published 10.00 points"),
        (-0.02, 0.01, "lower", -0.01, "same direction, larger", "larger than the published 1.00 points"),
        (0.02, 0.01, "higher", 0.02, "as published", ""),
        (0.001, 0.01, "higher", None, "undecided", "at the effect measured"),
        (0.001, 0.01, "higher", 0.002, "undecided", "at the published effect"),
        # the interval excludes an effect that would mostly have been missed
        (-0.005, 0.01, "higher", 0.003, "undecided", "at the published effect"),
        # power enough, and an interval that holds 0 and the effect alike
        (0.006, 0.01, "higher", 0.0125, "undecided", "at the effect measured"),
    ],
)
def test_a_direction_is_judged_by_its_interval_and_its_power(mean, spread, says, effect, verdict, why):
    found = judged(paired(mean, spread), claimed(says, effect=effect))
    assert found.verdict == verdict and why in found.why
    assert found.tests[0].mean == pytest.approx(mean) and found.tests[0].n == 10
    assert (found.seeds_needed is not None) == (verdict == "undecided")


def test_the_seeds_needed_are_those_of_the_t_test():
    (test,) = judged(paired(0.001, 0.01), claimed("higher", effect=0.002)).tests
    # of an effect of 0.2 standard deviations: 199 pairs, by the noncentral t distribution
    needed = next(n for n in range(10, 999) if _power(0.2, n) >= 0.8)
    assert needed == 199
    # the sign flips of ten pairs ask for another t than Student's
    assert needed * 0.85 < test.seeds_needed < needed * 1.15
    assert test.power == pytest.approx(_power(0.2, 10), abs=0.03)


def _power(effect, n):
    critical = stats.t.ppf(0.975, n - 1)
    return stats.nct.sf(critical, n - 1, effect * n**0.5) + stats.nct.cdf(-critical, n - 1, effect * n**0.5)


@pytest.mark.parametrize(
    ("mean", "spread", "verdict", "why"),
    [
        (0.001, 0.004, "as published", "within ±1.00 points"),
        (0.03, 0.01, "contrary", "lies outside ±1.00 points"),
        (-0.03, 0.01, "contrary", "lies outside ±1.00 points"),
        (0.003, 0.02, "undecided", "crosses ±1.00 points"),
        (0.012, 0.01, "undecided", "crosses ±1.00 points"),
    ],
)
def test_sameness_is_shown_within_a_margin_alone(mean, spread, verdict, why):
    own = judged(paired(mean, spread), claimed("same", margin=0.01))
    by_study = judged(paired(mean, spread, margin=0.01), claimed("same"))
    assert own.verdict == by_study.verdict == verdict and why in own.why
    assert judged(paired(mean, spread), claimed("same")).why == "no margin is declared"


@pytest.mark.parametrize(
    ("mean", "says", "by", "verdict"),
    [
        (0.04, "higher", 0.03, "as published"),
        # shown to be higher, and shown not to be by as much
        (0.02, "higher", 0.03, "contrary"),
        (0.03, "higher", 0.03, "undecided"),
        (-0.04, "lower", 0.03, "as published"),
        (-0.02, "lower", 0.03, "contrary"),
        # no worse: a loss that is smaller than allowed, and a gain
        (-0.02, "higher", -0.03, "as published"),
        (0.02, "higher", -0.03, "as published"),
        (-0.04, "higher", -0.03, "contrary"),
    ],
)
def test_a_direction_can_ask_for_an_amount(mean, says, by, verdict):
    ours = judge(paired(mean, 0.005), Claim(text="", source="", tests=(claimed(says, by=by),)))
    assert ours.verdict == verdict
    assert f"{100 * mean:+.2f} points".replace("-", "\N{MINUS SIGN}") in ours.ours
    assert ("to exceed " if says == "higher" else "to lie below ") in ours.ours
    beyond = "beyond what is allowed" if by < 0 else "does not reach the amount"
    assert {"as published": "", "contrary": beyond, "undecided": "holds the amount"}[verdict] in ours.why


def test_no_number_of_seeds_is_named_where_as_many_were_run():
    # seven of eight runs: a t-test would have shown it, the exact one does not
    level = claimed("higher", level=0.5)
    found = judge(study({"baseline": [0.0] * 8, "A()": [1.0] * 7 + [0.0]}), Claim(text="", source="", tests=(level,)))
    assert found.verdict == "undecided" and found.seeds_needed is None and "seeds would be needed" not in found.why
    # best inside an axis: the gain over the first value is shown, that over the last is not
    gains = 0.001 * noise(10)
    values = {"baseline": [0.5] * 10, "A(p=0.1)": [0.5] * 10}
    values |= {"A(p=0.2)": list(0.55 + gains), "A(p=0.3)": list(0.549 + 3 * gains[::-1])}
    inner = ClaimTest(arm=AXIS.text, outcome="test/accuracy", says="inside")
    found = judge(study(values, axes=[AXIS]), Claim(text="", source="", tests=(inner,)))
    assert found.verdict == "undecided" and "100,000" not in found.why
    assert found.seeds_needed is not None and 10 < found.seeds_needed < 200
    assert f"{found.seeds_needed} seeds would be needed" in found.why


def test_a_claim_is_not_undone_by_an_effect_of_its_own():
    made = paired(-0.02, 0.002)
    record = made.study.model_copy(
        update={"claims": [Claim(text="", source="", tests=(claimed("lower"), claimed("higher", by=-0.05)))]}
    )
    [found] = judged_claims(dataclasses.replace(made, study=record))
    assert found.verdict == "as published"


@pytest.mark.parametrize(("mean", "verdict"), [(-0.02, "margin too wide"), (0.005, "as published"), (-0.1, "contrary")])
def test_what_an_arm_may_be_worse_by_is_not_used_where_a_smaller_effect_is_reported(mean, verdict):
    claim = Claim(text="", source="", tests=(claimed("higher", by=-0.05),))
    assert judge(paired(mean, 0.005), claim).verdict == ("contrary" if mean < -0.05 else "as published")
    told = {"test/accuracy": Effect(0.01, "B()")}
    assert judge(paired(mean, 0.005), claim, effects=told).verdict == verdict


@pytest.mark.parametrize(
    ("mean", "verdict"), [(0.001, "margin too wide"), (0.04, "margin too wide"), (0.10, "contrary")]
)
def test_a_margin_wider_than_a_reported_effect_cannot_show_sameness_but_can_refute_it(mean, verdict):
    claim = Claim(text="", source="", tests=(claimed("same", margin=0.05),))
    assert judge(paired(mean, 0.005), claim).verdict == ("as published" if mean < 0.05 else "contrary")
    told = {"test/accuracy": Effect(0.02, "B()")}
    assert judge(paired(mean, 0.005), claim, effects=told).verdict == verdict


def test_sameness_needs_as_many_seeds_as_its_simulation_says():
    (test,) = judged(paired(0.003, 0.02), claimed("same", margin=0.01)).tests
    drawn = np.random.default_rng(1).normal(0.003, 0.02, (4000, test.seeds_needed))
    half = stats.t.ppf(0.95, test.seeds_needed - 1) * drawn.std(axis=1, ddof=1) / test.seeds_needed**0.5
    shown = (abs(drawn.mean(axis=1)) + half < 0.01).mean()
    assert 0.72 < shown < 0.88


@pytest.mark.parametrize(
    ("levels", "says", "verdict"),
    [
        ((0.5, 0.52, 0.54), "rises", "as published"),
        ((0.5, 0.52, 0.54), "falls", "contrary"),
        ((0.54, 0.52, 0.5), "falls", "as published"),
        ((0.5, 0.5, 0.501), "rises", "undecided"),
        ((0.5, 0.56, 0.5), "inside", "as published"),
        ((0.5, 0.52, 0.58), "inside", "contrary"),
        ((0.5, 0.501, 0.5), "inside", "undecided"),
        ((0.5, 0.501, 0.502), "inside", "undecided"),
    ],
)
def test_an_axis_rises_falls_or_has_its_best_inside(levels, says, verdict):
    rng = np.random.default_rng(3)
    arms = {arm: list(level + 0.01 * rng.normal(size=10)) for arm, level in zip(AXIS.arms, levels)}
    found = judged(study({"baseline": [0.5] * 10} | arms, axes=[AXIS]), claimed(says, arm=AXIS.text))
    assert found.verdict == verdict, found.why
    assert found.ours


def test_an_effect_along_an_axis_is_from_its_first_value_to_its_last():
    rng = np.random.default_rng(3)
    arms = {arm: list(0.5 + 0.01 * rng.normal(size=10)) for arm in AXIS.arms}
    made = study({"baseline": [0.5] * 10} | arms, axes=[AXIS])
    (much,) = judged(made, claimed("rises", arm=AXIS.text, effect=0.10)).tests
    (little,) = judged(made, claimed("rises", arm=AXIS.text, effect=0.01)).tests
    assert much.verdict == "no effect" and little.verdict == "undecided"


def test_who_diverges_is_told_by_mcnemar():
    base = ["diverged"] * 8 + [0.5, 0.6]
    made = study({"baseline": base, "A()": [0.5] * 10, "B()": base[:6] + [0.5] * 4})
    less = judged(made, claimed("lower", outcome="diverged"))
    more = judged(made, claimed("higher", outcome="diverged"))
    open_ = judged(made, claimed("lower", arm="B()", outcome="diverged"))
    assert (less.verdict, more.verdict, open_.verdict) == ("as published", "contrary", "undecided")
    assert less.ours == "A() diverged in 0 of 10 seeds, baseline in 8 (exact p = 0.0078)"
    # two of ten seeds: six of a kind in four of five studies take 38
    needed = next(n for n in range(6, 99) if stats.binom.sf(5, n, 0.2) >= 0.8)
    assert open_.seeds_needed == needed and f"{needed} seeds would be needed" in open_.why


def test_a_diverged_run_counts_as_failure_where_the_task_declares_it():
    figures = {"baseline": [0.5 + 0.01 * x for x in noise(10)], "A()": ["diverged"] * 10}
    assert judged(study(figures, failure=0.1), claimed("lower")).verdict == "as published"
    without = judged(study(figures), claimed("lower"))
    assert (without.verdict, without.why) == ("undecided", "no pair of finished runs")


def test_a_claim_agrees_only_whole_and_one_contradiction_is_enough():
    base = list(0.5 + 0.001 * noise(10))
    arms = {"A()": 0.02 + 0.01 * noise(10), "B()": 0.001 + 0.01 * noise(10)[::-1], "C()": -0.02 + 0.01 * noise(10)}
    made = study({"baseline": base} | {arm: list(base + by) for arm, by in arms.items()})
    up, open_, down = (claimed("higher", arm=arm) for arm in arms)
    assert judged(made, up).verdict == "as published"
    partly = judged(made, up, open_)
    assert partly.verdict == "undecided" and partly.why.startswith("B() in test/accuracy: ")
    assert partly.seeds_needed == partly.tests[1].seeds_needed
    assert judged(made, up, open_, down).verdict == "contrary"
    # every part is a test by itself: all of them must hold, and none is corrected
    assert partly.tests[0] == judged(made, up).tests[0]


def two_outcomes(first: float, last: float) -> StudyFolder:
    """Make a study of one arm whose figure in the last layer differs from that in the first."""
    found = study({"baseline": [first] * 10}, outcome="heads/J/layer 0")
    for (_, seed), run in found.runs.items():
        assert run.result is not None
        run.result.metrics["heads/J/layer 1"] = last + 0.1 * noise(10)[seed]
    return found


@pytest.mark.parametrize(
    ("last", "says", "verdict"),
    [(0.5, "lower", "as published"), (1.5, "lower", "contrary"), (1.0, "lower", "undecided")],
)
def test_an_outcome_can_be_held_against_another_of_the_same_arm(last, says, verdict):
    test = ClaimTest(arm="baseline", outcome="heads/J/layer 1", says=says, against_outcome="heads/J/layer 0")
    found = judged(two_outcomes(1.0, last), test)
    assert found.verdict == verdict
    assert found.tests[0].mean == pytest.approx(last - 1.0)
    assert "baseline in heads/J/layer 0 1.000" in found.ours


@pytest.mark.parametrize(
    ("says", "level", "more", "verdict"),
    [
        ("higher", 0.5, {}, "as published"),
        ("lower", 0.5, {}, "contrary"),
        ("same", 0.56, {"margin": 0.05}, "as published"),
        ("same", 0.8, {"margin": 0.05}, "contrary"),
    ],
)
def test_an_outcome_can_be_held_against_a_number(says, level, more, verdict):
    found = study({"baseline": list(0.55 + 0.01 * noise(10))})
    told = judged(found, ClaimTest(arm="baseline", outcome="test/accuracy", says=says, level=level, **more))
    assert told.verdict == verdict
    assert told.tests[0].mean == pytest.approx(0.55 - level) and f"compared with {100 * level:.2f}" in told.ours


def test_another_arm_than_the_baseline_can_be_the_reference():
    base = np.linspace(0.5, 0.6, 10)
    made = study({"baseline": list(base), "A()": list(base + 0.05), "B()": list(base + 0.04 + 0.002 * noise(10))})
    assert judged(made, claimed("higher", against="B()")).verdict == "as published"
    assert judged(made, claimed("higher", arm="B()", against="A()")).verdict == "contrary"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"arm": "B()"}, "the arm B() was not run"),
        ({"against": "B()"}, "the arm B() was not run"),
        ({"outcome": "test/f1"}, "outcome test/f1 was not recorded"),
        ({"says": "rises", "arm": "A(p={1,2,3})"}, "the axis A(p={1,2,3}) was not run"),
        ({"outcome": "diverged", "arm": "B()"}, "the arm B() was not run"),
    ],
)
def test_what_was_not_run_or_recorded_is_told_and_crashes_nothing(change, why):
    found = judged(paired(0.02, 0.01), claimed("higher", **change) if "says" not in change else claimed(**change))
    assert (found.verdict, found.why, found.seeds_needed) == ("not testable here", why, None)


def test_figures_that_are_nan_or_absent_make_no_pair():
    figures = {"baseline": [0.5] * 8 + [math.nan, None], "A()": [0.6 + 0.01 * x for x in noise(10)]}
    (test,) = judged(study(figures), claimed("higher")).tests
    assert (test.verdict, test.n) == ("as published", 8)
    nothing = judged(
        study({"baseline": [math.nan] * 8, "A()": [0.5] * 8}), claimed("higher"), claimed("same", margin=1)
    )
    assert nothing.verdict == "undecided" and "no pair of finished runs" in nothing.why
    every = judged(study({"baseline": [math.nan] * 8, "A()": [math.nan] * 8}), claimed("higher"))
    assert every.why == "outcome test/accuracy was not recorded"


@pytest.mark.parametrize("seeds", [1, 2, 5])
def test_too_few_seeds_tell_nothing_however_equal_the_differences(seeds):
    base = list(np.linspace(0.5, 0.6, seeds))
    made = study({"baseline": base, "A()": [one + 0.1 for one in base]}, margin=0.2)
    for test in (claimed("higher"), claimed("lower", effect=0.1), claimed("same")):
        found = judged(made, test)
        assert found.verdict == "undecided" and found.seeds_needed == 6, found.why


@pytest.mark.parametrize(
    ("level", "says", "scale", "verdict"),
    [
        (0.56, "same", "", "as published"),
        (0.50, "same", "", "contrary"),
        (0.50, "higher", "", "as published"),
        (0.56, "same", "paper", "not testable here"),
        (0.50, "same", "paper", "not testable here"),
        (0.56, "same", "small", "as published"),
    ],
)
def test_an_arm_is_held_against_a_published_level_at_its_own_scale_alone(level, says, scale, verdict):
    # an arm of mean 0.56, whatever the baseline does
    found = study({"baseline": [0.9] * 10, "A()": list(0.56 + 0.01 * noise(10))})
    found = dataclasses.replace(found, study=found.study.model_copy(update={"scale": "small"}))
    margin = 0.03 if says == "same" else None
    test = judged(found, claimed(says, level=level, scale=scale, margin=margin)).tests[0]
    assert test.verdict == verdict and test.mean == pytest.approx(0.56 - level)
    assert f"accuracy of A() 56.00, compared with {100 * level:.2f} %" in test.ours
    assert ("judged at the scale 'paper' alone" in test.why) == (scale == "paper")


def test_a_claim_without_a_test_cannot_be_told():
    found = judge(paired(0.02, 0.01), Claim(text="It looks better."))
    assert (found.verdict, found.why) == ("not testable here", "this study holds no test of it")


def test_divergence_and_numbers_are_each_judged_by_themselves():
    base = ["diverged"] * 6 + [0.5 + 0.01 * x for x in noise(10)[:4]]
    made = study({"baseline": base, "A()": [0.6] * 10}, failure=0.1)
    # six seeds decide (p 0.031), whatever else the claim says
    both = judged(made, claimed("lower", outcome="diverged"), claimed("higher"))
    assert [test.verdict for test in both.tests] == ["as published"] * 2 and both.verdict == "as published"
    # against the claim they do not, beside another test: either could have been wrong
    against = judged(made, claimed("higher", outcome="diverged"), claimed("higher"))
    assert against.tests[0].verdict == "contrary" and against.verdict == "undecided"
    assert "not in the joint intervals of 2 tests" in against.why
    assert judged(made, claimed("higher", outcome="diverged")).verdict == "contrary"


@pytest.mark.parametrize(
    ("diverged", "margin", "verdict"),
    [(0, 0.5, "as published"), (2, 0.5, "undecided"), (9, 0.5, "contrary"), (0, 0.1, "undecided")],
)
def test_as_many_diverged_runs_are_shown_by_exact_bounds(diverged, margin, verdict):
    made = study({"baseline": [0.5] * 10, "A()": ["diverged"] * diverged + [0.5] * (10 - diverged)}, failure=0.1)
    found = judged(made, claimed("same", outcome="diverged", margin=margin))
    assert found.verdict == verdict
    # no more than a quarter of the seeds, where none of ten diverged
    assert float(stats.beta.ppf(0.95, 1, 10)) == pytest.approx(0.2589, abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"says": "inside", "outcome": "diverged"}, "higher, lower, same, rises or falls"),
        ({"says": "rises", "arm": "A(p={1,2})", "margin": 0.1}, "along an axis a margin has no meaning"),
        ({"says": "same", "effect": 0.1}, "takes no effect"),
        ({"says": "higher", "effect": -0.1}, "not what says='higher' means"),
        ({"says": "bigger"}, "says"),
        ({"says": "same", "margin": -1}, "margin"),
        ({"says": "higher", "level": 0.6, "against": "same"}, "takes the place of another arm"),
        ({"says": "rises", "level": 0.1}, "neither another outcome nor a level"),
        ({"says": "lower", "outcome": "diverged", "against_outcome": "test/loss"}, "compared with no other outcome"),
        ({"says": "lower", "level": 0.1, "against_outcome": "test/loss"}, "not both"),
        ({"says": "same", "by": 0.1}, "a number that is higher or lower"),
        ({"says": "higher", "by": 0.1, "outcome": "diverged"}, "a number that is higher or lower"),
        ({"says": "higher", "by": 0.1, "effect": 0.2}, "neither a level, an effect nor a margin"),
    ],
)
def test_a_test_without_a_meaning_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        claimed(**settings)


RATES = {"A(p=0.1)": 0, "A(p=0.2)": 3, "A(p=0.3)": 9}


def rising(counts=RATES, **settings):
    """A study in whose first seeds the runs of each value diverge, and never the baseline's."""
    runs = {arm: ["diverged"] * count + [0.5] * (10 - count) for arm, count in counts.items()}
    return study({"baseline": [0.5] * 10} | runs, axes=[AXIS], **settings)


def test_the_share_of_diverged_runs_rises_along_an_axis():
    claim = Claim(text="?", tests=(ClaimTest(arm=AXIS.text, outcome="diverged", says="rises"),))
    found = judge(rising(), claim)
    assert found.verdict == "as published"
    assert found.tests[0].mean == pytest.approx(0.45) and found.tests[0].low > 0
    assert "diverged runs 0.00 at 0.1 and 90.00 at 0.3 %" in found.ours
    falling = claim.model_copy(update={"tests": (claim.tests[0].model_copy(update={"says": "falls"}),)})
    assert judge(rising(), falling).verdict == "contrary"
    assert judge(rising(dict.fromkeys(RATES, 1)), claim).verdict == "undecided"


def test_shares_of_diverged_runs_are_an_outcome_where_there_is_an_axis():
    from headwise_verdict.results.analysis import analyse_study

    found = analyse_study(rising())
    by_arm = {arm.label: arm.metrics["diverged"] for arm in found.arms}
    assert by_arm["A(p=0.2)"].mean == 0.3
    exact = stats.beta.ppf([0.025, 0.975], [3, 4], [8, 7])
    assert (by_arm["A(p=0.2)"].low, by_arm["A(p=0.2)"].high) == pytest.approx(tuple(exact))
    assert by_arm["baseline"].low == 0 and by_arm["baseline"].high == pytest.approx(1 - 0.025 ** (1 / 10))
    (trend,) = [one for one in found.trends if one.outcome == "diverged"]
    assert trend.step == pytest.approx(0.45) and trend.p < 0.01 and trend.seeds == 10
    # without an axis the exact test on pairs says it all
    assert "diverged" not in analyse_study(study({"baseline": [0.5] * 6, "A()": ["diverged"] * 6})).outcomes


def test_two_axes_of_one_setting_are_told_apart():
    from headwise_verdict.results.analysis import analyse_study

    other = AXIS.model_copy(update={"text": "B(p={0.1,0.2,0.3})", "arms": [a.replace("A", "B") for a in AXIS.arms]})
    values = {arm: [0.5, 0.6, 0.4] for arm in (*AXIS.arms, *other.arms)}
    found = analyse_study(study({"baseline": [0.5] * 3} | values, axes=[AXIS, other]))
    assert {one.axis for one in found.trends} == {AXIS.text, other.text}


def test_what_was_read_while_a_run_trained_counts_though_it_diverged():
    metrics = {
        "test/accuracy": None,
        "alerts/entropy_collapse/lead": 30.0,
        "watched/sharpness/greatest": 9.0,
        "cost/parameters": 5.0,
    }
    result = RunResult(
        status="diverged", arm="A()", seed=0, hash="0", metrics=metrics, divergence=Divergence(step=3), format=2
    )
    run = RunFolder("A()", 0, Path("run"), result)
    assert run.metric("alerts/entropy_collapse/lead") == 30 and run.metric("watched/sharpness/greatest") == 9
    assert run.metric("test/accuracy") is None and run.metric("cost/parameters") is None


def one_of_many(outcome: str, mean: float, half: float, **more) -> JudgedTest:
    told = {"mean": mean, "low": mean - half, "high": mean + half, "n": 6, "ours": f"{outcome} {mean}"}
    return JudgedTest(arm="A()", outcome=outcome, says="lower", **told | more)


def test_many_tests_of_one_kind_are_counted_in_words():
    tests = [one_of_many(f"heads/matrix_norm/{at}", -0.2, 0.1, verdict="as published") for at in range(3)]
    tests += [
        one_of_many(
            f"heads/matrix_norm/open {at}",
            0.05,
            0.1,
            verdict="undecided",
            why="the interval holds 0; 9 seeds",
            seeds_needed=9 + at,
        )
        for at in range(2)
    ]
    tests.append(one_of_many("test/accuracy", -0.3, 0.1, against="B()", verdict="as published"))
    said = figures_in_words(tests)
    assert said == (
        "5 outcomes in matrix norm of A() against baseline: lower in 3, higher in 0, open in 2; "
        "mean differences from −0.2 to +0.05; test/accuracy -0.3"
    )
    why = reasons_in_words(tests, "undecided")
    assert why == "A(): the interval holds 0 in 2 of 5 outcomes; up to 10 seeds would be needed"
    assert reasons_in_words(tests, "as published") == ""


def test_few_tests_are_told_one_by_one():
    tests = [one_of_many(f"heads/matrix_norm/{at}", 0.0, 0.1, verdict="undecided", why="open") for at in range(2)]
    assert figures_in_words(tests) == "heads/matrix_norm/0 0.0; heads/matrix_norm/1 0.0"
    assert reasons_in_words(tests, "undecided") == "A() in heads/matrix_norm/0: open; A() in heads/matrix_norm/1: open"
    assert reasons_in_words(tests[:1], "undecided") == "open"
