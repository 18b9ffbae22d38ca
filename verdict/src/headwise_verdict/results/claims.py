"""The verdicts on a study's claims, from their tests and the premises that they require.

Each test is judged at 5 % separately. A claim holds if all of its tests do: an intersection-union test, which needs no
correction. One contrary test is enough to refute a claim, which does need a correction: a contradiction counts only if
it also holds in the joint intervals of all the claim's tests.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headwise_verdict.files.errors import count
from headwise_verdict.pages.formats import Unit, p_value, unit_named
from headwise_verdict.results.analysis_record import (
    AGAINST,
    HELD,
    SIGNS,
    JudgedClaim,
    JudgedPremise,
    JudgedTest,
    Verdict,
)
from headwise_verdict.results.claim_figures import Figures, diverged_pairs, gather
from headwise_verdict.results.claim_tests import (
    ClaimDecision,
    Criteria,
    Estimate,
    directed,
    diverged,
    diverged_as_often,
    figures_in_words,
    inside,
    margins_in_words,
    reasons_in_words,
    same,
)
from headwise_verdict.results.intervals import ALPHA, JointIntervals, equivalence
from headwise_verdict.results.records import Claim, ClaimTest, Outcome, OutcomeNames, Premise

if TYPE_CHECKING:
    from headwise_verdict.results.folder import StudyFolder
    from headwise_verdict.results.joint_flips import Table


class Effect(NamedTuple):
    """A difference that a page reports as an effect, and its arm."""

    size: float
    arm: str


def judged_premises(study: StudyFolder) -> list[JudgedPremise]:
    """Return every premise of a study with its result."""
    diverged_arms = all_diverged(study)
    return [premised(one, judged_tests(study, one.tests, {}), diverged_arms) for one in study.study.premises]


def all_diverged(study: StudyFolder) -> set[str]:
    """Return the arms whose ended runs all diverged; they learned nothing, but have no figure that shows it."""
    ended = {arm: [run.status for run in study.of(arm) if run.result] for arm in study.arms}
    return {arm for arm, states in ended.items() if states and set(states) == {"diverged"}}


def judged_claims(study: StudyFolder, premises: Sequence[JudgedPremise] | None = None) -> list[JudgedClaim]:
    """Return every claim of a study with its verdict.

    A margin, or an amount by which an arm may be worse, is not used if another claim calls a smaller difference in the
    same outcome an effect; to refute sameness a wide margin is enough.
    """
    judged = judged_premises(study) if premises is None else premises
    first = [judge(study, claim, judged) for claim in study.study.claims]
    others = [first[:at] + first[at + 1 :] for at in range(len(first))]
    return [judge(study, claim, judged, _effects(of)) for claim, of in zip(study.study.claims, others)]


def judge(
    study: StudyFolder, claim: Claim, premises: Sequence[JudgedPremise] = (), effects: dict[str, Effect] | None = None
) -> JudgedClaim:
    """Return a claim with its verdict; `effects` are the smallest differences reported as effects, by outcome."""
    tests = judged_tests(study, claim.tests, effects or {})
    failed = [one for one in premises if one.holds is False and (claim.needs is None or one.name in claim.needs)]
    return claimed(claim, tests, failed)


def judged_tests(study: StudyFolder, tests: Sequence[ClaimTest], effects: dict[str, Effect]) -> list[JudgedTest]:
    """Return the tests with their verdicts, each judged alone and jointly with the others."""
    outcomes = [study.study.outcome(test.outcome) for test in tests]
    figures = [None if _by_pairs(test) else gather(study, test, outcome) for test, outcome in zip(tests, outcomes)]
    numbers = [one for one in figures if isinstance(one, Figures)]
    # tests of divergence use a separate share of the error: flips cannot combine them with the others
    separate = sum(map(_by_pairs, tests))
    alpha = ALPHA * (1 - separate / max(len(tests), 1))
    # judged alone, a test has one column; only "inside" has several, which are judged jointly
    estimates = iter(zip([_estimates(one.columns, ALPHA) for one in numbers], _joint_estimates(numbers, alpha)))
    judged = []
    for test, outcome, one in zip(tests, outcomes, figures):
        if one is None:
            judged.append(_divergence(study, test, len(tests)))
        elif isinstance(one, str):
            judged.append(_judged(test, ClaimDecision("not testable here", one)))
        else:
            judged.append(_judged_number(study, test, outcome, one, *next(estimates), alpha, effects.get(test.outcome)))
    return judged


def _by_pairs(test: ClaimTest) -> bool:
    """Return whether McNemar's exact test applies; along an axis or against a level, divergence is a number."""
    return test.outcome == OutcomeNames.DIVERGED and not test.along_axis and test.level is None


def premised(premise: Premise, tests: list[JudgedTest], lost: Collection[str] = ()) -> JudgedPremise:
    """Return a premise with the result of its judged tests; `lost` are the arms whose runs all diverged."""
    fields = {"name": premise.name, "text": premise.text, "ours": figures_in_words(tests), "tests": tests}
    states = [_shown(test, lost) for test in tests]
    return JudgedPremise(**fields, holds=False if False in states else None if None in states or not states else True)


def _shown(test: JudgedTest, lost: Collection[str]) -> bool | None:
    """Return whether a test of a premise was shown; None if the runs did not record its figure."""
    if test.mean is None and test.arm in lost and not test.scale:
        return False
    if test.verdict == "not testable here" or test.mean is None:
        return None
    return test.shown


def _effects(claims: Iterable[JudgedClaim]) -> dict[str, Effect]:
    """Return, by outcome, the smallest difference that a claim which holds calls an effect."""
    smallest: dict[str, Effect] = {}
    for claim in claims:
        for test in claim.tests if claim.verdict in HELD else ():
            if test.says not in ("higher", "lower") or test.mean is None or (test.level, test.by) != (None, None):
                continue
            effect = Effect(abs(test.mean), test.arm)
            smallest[test.outcome] = min(smallest.get(test.outcome, effect), effect)
    return smallest


def claimed(claim: Claim, tests: list[JudgedTest], failed: list[JudgedPremise]) -> JudgedClaim:
    """Return a claim with the verdict that follows from its judged tests and from the premises that failed."""
    fields: dict[str, Any] = {
        "text": claim.text,
        "source": claim.source,
        "published": claim.published,
        "tests": tests,
        "ours": figures_in_words(tests),
        "kind": claim.kind,
        "before": list(claim.before),
    }
    if not tests:
        return JudgedClaim(**fields, verdict="not testable here", why="this study holds no test of it")
    if failed:
        why = "; ".join(f"premise: {one.text or one.name} ({one.ours})" for one in failed)
        return JudgedClaim(**fields, verdict="not testable here", why=why)
    verdict = _verdict(tests)
    fields |= {"verdict": verdict, "why": reasons_in_words(tests, verdict)}
    if verdict in ("no effect", "margin too wide"):
        fields["within"] = margins_in_words(tests, verdict)
    if verdict == "undecided":
        needed = [test.seeds_needed for test in tests if test.verdict == "undecided"]
        fields["seeds_needed"] = None if None in needed or not needed else max(one for one in needed if one is not None)
        if alone := [test for test in tests if test.verdict in AGAINST]:
            fields["why"] = "; ".join(filter(None, [fields["why"], _not_joint(alone, len(tests))]))
    return JudgedClaim(**fields)


def _verdict(tests: list[JudgedTest]) -> Verdict:
    """Return the verdict of a claim that requires all of its tests to hold."""
    verdicts = [test.verdict for test in tests]
    if "not testable here" in verdicts:
        return "not testable here"
    if any(test.verdict == "contrary" and test.refutes for test in tests):
        return "contrary"
    if all(one in HELD for one in verdicts):
        return next(one for one in (HELD[1], HELD[2], HELD[0]) if one in verdicts)
    if any(test.verdict == "no effect" and test.refutes for test in tests):
        return "no effect"
    # such a test can never hold, so more seeds for the others decide nothing
    return "margin too wide" if "margin too wide" in verdicts else "undecided"


def _not_joint(tests: list[JudgedTest], many: int) -> str:
    verdicts = ", ".join(f"{test.arm} in {test.outcome} {test.verdict}" for test in tests)
    return f"{verdicts}, but not in the joint intervals of {many} tests"


def _joint_estimates(figures: list[Figures], alpha: float) -> list[list[Estimate]]:
    """Return the estimates of every test with intervals that hold for all tests of the claim jointly."""
    import numpy as np

    if not figures:
        return []
    estimates = iter(_estimates(np.concatenate([one.columns for one in figures], axis=1), alpha))
    return [[next(estimates) for _ in range(one.columns.shape[1])] for one in figures]


def _estimates(table: Table, alpha: float) -> list[Estimate]:
    intervals = JointIntervals(table)
    outer, inner = intervals.bounds(alpha), intervals.bounds(2 * alpha)
    errors, p = intervals.errors(), intervals.p_zero()
    return [
        Estimate(
            float(intervals.means[at]) if intervals.pairs[at] else None,
            outer[at].low,
            outer[at].high,
            inner[at].low,
            inner[at].high,
            # equal differences have a standard error of rounding only
            0.0 if outer[at].low == outer[at].high else float(errors[at]),
            int(intervals.pairs[at]),
            p[at] if intervals.pairs[at] else None,
        )
        for at in range(table.shape[1])
    ]


def _judged_number(
    study: StudyFolder,
    test: ClaimTest,
    outcome: Outcome,
    figures: Figures,
    estimated: list[Estimate],
    jointly_estimated: list[Estimate],
    alpha: float,
    effect: Effect | None,
) -> JudgedTest:
    if test.scale not in ("", study.study.scale):
        why = ClaimDecision("not testable here", f"it is judged at the scale {test.scale!r} alone")
        if test.says == "inside":
            return _judged(test, why)
        one = _on_scale(estimated[0], figures)
        return _judged(test, why, one, ours=_ours(test, outcome, figures, one))
    criteria = Criteria(
        ALPHA, unit_named(outcome.unit), _step(test, figures, test.effect), _margin(study, test, figures)
    )
    margin_note = ""
    if test.says == "inside":
        jointly = inside(*_first_and_last(jointly_estimated), criteria._replace(alpha=alpha))
        return _inside(test, outcome, figures, estimated, criteria, refutes=jointly.verdict in AGAINST)
    (one,), (other,) = estimated, jointly_estimated
    if criteria.margin is not None and effect is not None and test.level is None and criteria.margin > effect.size:
        wide = (
            f"the margin ±{criteria.words(criteria.margin)} is wider than the {criteria.words(effect.size)} of "
            f"{effect.arm}, reported as an effect here"
        )
        margin_note = f"; {wide}"
        if test.says != "same":
            criteria = criteria._replace(margin=None)
        # what lies outside a wide margin lies outside a narrower one too
        elif same(one, criteria).verdict == "as published":
            one = _on_scale(one, figures)
            ours = _ours(test, outcome, figures, one)
            return _judged(test, ClaimDecision("margin too wide", wide), one, ours=ours, margin=criteria.margin)
    if test.says == "same":
        decision, jointly = same(one, criteria), same(other, criteria._replace(alpha=alpha))
        if decision.verdict == "undecided" and margin_note:
            # with more seeds the interval might lie outside the margin, but within it would show nothing
            decision = decision._replace(why=decision.why.partition(";")[0] + margin_note, seeds=None)
    else:
        sign = SIGNS[test.says]
        decision, jointly = directed(one, sign, criteria), directed(other, sign, criteria._replace(alpha=alpha))
        if decision.verdict == "undecided":
            decision = decision._replace(why=decision.why + margin_note)
        if test.by is not None:
            decision = within_allowance(test, one, by_amount(test, decision), effect, criteria)
    # power and numbers of seeds are of the whole interval
    one = _on_scale(one, figures)
    fields: dict[str, Any] = {
        "ours": _ours(test, outcome, figures, one),
        "margin": None if test.along_axis else criteria.margin,
    }
    if test.says == "same" and criteria.margin is not None:
        (equal,) = equivalence(JointIntervals(figures.columns), criteria.margin)
        one = one._replace(p=equal.p)
    return _judged(test, decision, one, **fields, refutes=jointly.verdict in AGAINST)


def _on_scale(estimate: Estimate, figures: Figures) -> Estimate:
    """Return an estimate whose intervals end where the differences do."""
    clipped = figures.scale.clipped
    low, high = clipped(estimate.mean, estimate.low, estimate.high)
    inner_low, inner_high = clipped(estimate.mean, estimate.inner_low, estimate.inner_high)
    return estimate._replace(low=low, high=high, inner_low=inner_low, inner_high=inner_high)


def by_amount(test: ClaimTest, decision: ClaimDecision) -> ClaimDecision:
    """Return the decision on a difference that must exceed an amount, in words that speak of the amount."""
    missed = "reaches beyond what is allowed" if (test.by or 0.0) < 0 else "does not reach the amount"
    why = decision.why.replace("the difference is of the other sign", f"the interval {missed}")
    return decision._replace(why=why.replace("the interval holds 0", "the interval holds the amount"))


def within_allowance(
    test: ClaimTest, shifted: Estimate, decision: ClaimDecision, effect: Effect | None, criteria: Criteria
) -> ClaimDecision:
    """Return the decision; an amount by which an arm may be worse is not used if an effect reported here is smaller."""
    allowance = -(test.by or 0.0)
    if effect is None or allowance <= effect.size or decision.verdict != "as published":
        return decision
    # an arm shown to be better needs no allowance; `shifted` has it added
    end = shifted.low if test.says == "higher" else shifted.high
    if end is not None and abs(end) > allowance:
        return decision
    words = criteria.words
    return ClaimDecision(
        "margin too wide",
        f"the {words(allowance)} allowed are more than the {words(effect.size)} of {effect.arm}, reported as an effect "
        "here",
    )


def _step(test: ClaimTest, figures: Figures, effect: float | None) -> float | None:
    """Return an effect in the unit of the differences: along an axis from one value to the next."""
    return effect / (len(figures.values) - 1) if test.along_axis and effect is not None else effect


def _first_and_last(estimates: list[Estimate]) -> tuple[list[Estimate], list[Estimate]]:
    return estimates[: len(estimates) // 2], estimates[len(estimates) // 2 :]


def _inside(
    test: ClaimTest, outcome: Outcome, figures: Figures, estimates: list[Estimate], criteria: Criteria, *, refutes: bool
) -> JudgedTest:
    first, last = _first_and_last(estimates)
    decision = inside(first, last, criteria)
    best = max(range(len(first)), key=lambda at: min(_or_least(first[at].mean), _or_least(last[at].mean)))
    first, last = ([_on_scale(one, figures) for one in gains] for gains in (first, last))
    smaller = min((first[best], last[best]), key=lambda one: _or_least(one.mean))
    words = f"{outcome.label} is best inside at {figures.values[1 + best]:g}"
    if first[best].mean is not None:
        ends = (first[best], figures.values[0]), (last[best], figures.values[-1])
        gains = (f"{_difference(one, outcome)} over {value:g}" for one, value in ends)
        words += f": gains {' and '.join(gains)}"
    return _judged(test, decision, smaller, ours=words, refutes=refutes)


def _divergence(study: StudyFolder, test: ClaimTest, tests: int) -> JudgedTest:
    pairs = diverged_pairs(study, test)
    if isinstance(pairs, str):
        return _judged(test, ClaimDecision("not testable here", pairs))
    ours, other = pairs
    decision, p = _by_divergence(test, ours, other, ALPHA)
    p_words = p_value(p) or ""
    words = (
        f"{test.arm} diverged in {sum(ours)} of {count(len(ours), 'seed')}, {test.against} in {sum(other)} "
        f"(exact p {p_words if p_words.startswith('<') else f'= {p_words}'})"
    )
    mean = (sum(ours) - sum(other)) / len(ours) if ours else None
    jointly_judged, _ = _by_divergence(test, ours, other, ALPHA / tests)
    refutes = jointly_judged.verdict in AGAINST
    return _judged(test, decision, ours=words, p=p, mean=mean, n=len(ours), refutes=refutes)


def _by_divergence(test: ClaimTest, ours: list[bool], other: list[bool], alpha: float) -> tuple[ClaimDecision, float]:
    criteria = Criteria(alpha, unit_named("%"), test.effect, test.margin)
    return (
        diverged_as_often(ours, other, criteria)
        if test.says == "same"
        else diverged(ours, other, SIGNS[test.says], criteria)
    )


def _judged(test: ClaimTest, decision: ClaimDecision, estimate: Estimate | None = None, **fields: Any) -> JudgedTest:
    if estimate is not None:
        fields |= {"mean": estimate.mean, "low": estimate.low, "high": estimate.high, "n": estimate.pairs}
        fields |= {"inner_low": estimate.inner_low, "inner_high": estimate.inner_high, "p": estimate.p}
    fields |= {
        "power": decision.power,
        "seeds_needed": decision.seeds,
        "verdict": decision.verdict,
        "why": decision.why,
    }
    return JudgedTest(**test.model_dump() | fields)


def _margin(study: StudyFolder, test: ClaimTest, figures: Figures) -> float | None:
    """Return the margin: the test's own, else half of the published effect, else the study's where it applies."""
    if test.says == "inside":
        return None
    if test.margin is not None:
        return test.margin
    if (effect := _step(test, figures, test.effect)) is not None:
        return abs(effect) / 2
    alike = test.outcome.rpartition("/")[2] == study.study.primary.rpartition("/")[2]
    of_differences = not test.along_axis and test.level is None and test.by is None
    return study.study.margin if alike and of_differences else None


def _ours(test: ClaimTest, outcome: Outcome, figures: Figures, estimate: Estimate) -> str:
    unit = unit_named(outcome.unit)
    if test.along_axis:
        ends = [
            f"{unit.number(figures.means[at])} at {figures.values[at]:g}"
            for at in (0, -1)
            if math.isfinite(figures.means[at])
        ]
        levels = f"{' and '.join(ends)} {unit.name}".strip()
        return f"{outcome.label} {levels}: {_difference(estimate, outcome)} from one value to the next".replace(
            "  ", " "
        )
    if estimate.mean is None:
        return f"{outcome.label}: no pair of {test.arm} and {_other(test)}"
    other = f"{_other(test)} {unit.number(figures.means[1] - test.beyond)}"
    levels = f"{test.arm} {unit.number(figures.means[0])}, {other} {unit.name}"
    words = f"{outcome.label} of {levels.strip()}: "
    if test.by is None:
        return words + _difference(estimate, outcome)
    low, high = (None if end is None else end + test.beyond for end in (estimate.low, estimate.high))
    difference = estimate._replace(mean=estimate.mean + test.beyond, low=low, high=high)
    return words + f"{_difference(difference, outcome)}, {amount_in_words(test, unit)}"


def constant(seeds: int) -> str:
    """Return the words for a figure without spread, which has no interval."""
    return f"the same in all {seeds:,} seeds"


def amount_in_words(test: ClaimTest, unit: Unit) -> str:
    """Return what a difference must exceed or lie below."""
    return f"to {'exceed' if test.says == 'higher' else 'lie below'} {unit.number(test.beyond, signed=True)}"


def _other(test: ClaimTest) -> str:
    """Return the words for what an arm is compared with."""
    if test.level is not None:
        return "compared with"
    return f"{test.against} in {test.against_outcome}" if test.against_outcome else test.against


def _difference(estimate: Estimate, outcome: Outcome) -> str:
    unit = unit_named(outcome.unit)
    words = f"{unit.number(estimate.mean, signed=True)} {unit.difference}".strip()
    if estimate.pairs > 1 and estimate.low is not None and estimate.low == estimate.high:
        return f"{words}, {constant(estimate.pairs)}"
    return f"{words} {unit.interval(estimate.low, estimate.high, signed=True)}".strip()


def _or_least(mean: float | None) -> float:
    return -math.inf if mean is None else mean
