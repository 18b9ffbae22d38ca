"""Judge the claims of a study by their tests: agrees, does not agree, or cannot be told at this size.

The differences of all tests of a claim are one family: their intervals hold together with 95 %, by the joint sign flips
that the arms are compared with. A claim agrees if all of its tests do, and does not if an interval contradicts one of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from headwise.pages.formats import p_value, unit_named
from headwise.results.answer import count
from headwise.results.claim_figures import Figures, diverged_pairs, gather
from headwise.results.claim_record import JudgedClaim, JudgedTest
from headwise.results.claim_tests import Ask, Seen, Told, directed, diverged, inside, same
from headwise.results.claim_words import figures_in_words, reasons_in_words
from headwise.results.intervals import ALPHA
from headwise.results.outcome_names import DIVERGED
from headwise.results.records import Claim, ClaimTest, Outcome
from headwise.results.simultaneous import JointIntervals

if TYPE_CHECKING:
    from headwise.results.folder import StudyFolder

SIGNS = {"higher": 1, "lower": -1, "rises": 1, "falls": -1}


def judged_claims(study: StudyFolder) -> list[JudgedClaim]:
    """Return every claim of a study with its verdict."""
    return [judge(study, claim) for claim in study.study.claims]


def judge(study: StudyFolder, claim: Claim) -> JudgedClaim:
    """Return a claim with its verdict; one without a test cannot be told."""
    outcomes = [study.study.outcome(test.outcome) for test in claim.tests]
    figures = [
        None if _by_pairs(test) else gather(study, test, outcome)
        for test, outcome in zip(claim.tests, outcomes)
    ]
    numbers = [one for one in figures if isinstance(one, Figures)]
    # tests on divergence take their part of the error apart: no flips join them with the others
    apart = sum(map(_by_pairs, claim.tests))
    alpha = ALPHA * (1 - apart / max(len(claim.tests), 1))
    seen = iter(_seen(numbers, alpha))
    tests = []
    for test, outcome, one in zip(claim.tests, outcomes, figures):
        if one is None:
            tests.append(_divergence(study, test, ALPHA / len(claim.tests)))
        elif isinstance(one, str):
            tests.append(_judged(test, Told("cannot be told", one)))
        else:
            tests.append(_number(study, test, outcome, one, next(seen), alpha))
    return _claim(claim, tests)


def _by_pairs(test: ClaimTest) -> bool:
    """Tell whether McNemar's exact test judges: along an axis shares of diverged runs have a slope like any figure."""
    return test.outcome == DIVERGED and not test.along_axis


def _claim(claim: Claim, tests: list[JudgedTest]) -> JudgedClaim:
    found = [test.verdict for test in tests]
    said = {"text": claim.text, "source": claim.source, "published": claim.published, "tests": tests}
    said["ours"] = figures_in_words(tests)
    if not tests:
        return JudgedClaim(**said, verdict="cannot be told", why="this study holds no test of it")
    if "does not agree" in found:
        return JudgedClaim(**said, verdict="does not agree", why=reasons_in_words(tests, "does not agree"))
    if "cannot be told" in found:
        needed = [test.seeds_needed for test in tests if test.verdict == "cannot be told"]
        seeds = None if None in needed else max(one for one in needed if one is not None)
        return JudgedClaim(**said, verdict="cannot be told", why=reasons_in_words(tests, "cannot be told"), seeds_needed=seeds)
    return JudgedClaim(**said, verdict="agrees", why=reasons_in_words(tests, "agrees"))


def _seen(figures: list[Figures], alpha: float) -> list[list[Seen]]:
    """Return what was seen of every column, with intervals that hold for all columns of the claim together."""
    import numpy as np

    if not figures:
        return []
    table = np.concatenate([one.columns for one in figures], axis=1)
    joint = JointIntervals(table)
    outer, inner, errors = joint.bounds(alpha), joint.bounds(2 * alpha), joint.errors()
    columns = [
        Seen(
            float(joint.means[at]) if joint.pairs[at] else None,
            outer[at].low,
            outer[at].high,
            inner[at].low,
            inner[at].high,
            # equal differences leave an error of rounding
            0.0 if outer[at].low == outer[at].high else float(errors[at]),
            int(joint.pairs[at]),
        )
        for at in range(table.shape[1])
    ]
    found = iter(columns)
    return [[next(found) for _ in range(one.columns.shape[1])] for one in figures]


def _number(
    study: StudyFolder, test: ClaimTest, outcome: Outcome, figures: Figures, seen: list[Seen], alpha: float
) -> JudgedTest:
    ask = Ask(alpha, unit_named(outcome.unit), test.effect, _margin(study, test))
    if test.says == "inside":
        return _inside(test, outcome, figures, seen, ask)
    (one,) = seen
    if test.scale not in ("", study.study.scale):
        told = Told("cannot be told", f"it is judged at the scale {test.scale!r} alone")
    elif test.says == "same":
        told = same(one, ask)
    else:
        if test.along_axis and test.effect is not None:
            ask = ask._replace(effect=test.effect / (len(figures.values) - 1))
        told = directed(one, SIGNS[test.says], ask)
    return _judged(test, told, one, ours=_ours(test, outcome, figures, one), margin=ask.margin)


def _inside(test: ClaimTest, outcome: Outcome, figures: Figures, seen: list[Seen], ask: Ask) -> JudgedTest:
    half = len(seen) // 2
    first, last = seen[:half], seen[half:]
    told = inside(first, last, ask)
    best = max(range(half), key=lambda at: min(_or_least(first[at].mean), _or_least(last[at].mean)))
    smaller = min((first[best], last[best]), key=lambda one: _or_least(one.mean))
    words = f"{outcome.label} is best inside at {figures.values[1 + best]:g}"
    if first[best].mean is not None:
        gains = (f"{_difference(one, outcome)} over {value:g}" for one, value in _ends(first, last, best, figures))
        words += f": gains {' and '.join(gains)}"
    return _judged(test, told, smaller, ours=words)


def _ends(first: list[Seen], last: list[Seen], best: int, figures: Figures) -> list[tuple[Seen, float]]:
    return [(first[best], figures.values[0]), (last[best], figures.values[-1])]


def _divergence(study: StudyFolder, test: ClaimTest, alpha: float) -> JudgedTest:
    found = diverged_pairs(study, test)
    if isinstance(found, str):
        return _judged(test, Told("cannot be told", found))
    ours, other = found
    told, p = diverged(ours, other, SIGNS[test.says], Ask(alpha, unit_named("%"), test.effect))
    said = p_value(p) or ""
    words = (
        f"{test.arm} diverged in {sum(ours)} of {count(len(ours), 'seed')}, {test.against} in {sum(other)} "
        f"(exact p {said if said.startswith('<') else f'= {said}'})"
    )
    mean = (sum(ours) - sum(other)) / len(ours) if ours else None
    return _judged(test, told, ours=words, p=p, mean=mean, n=len(ours))


def _judged(test: ClaimTest, told: Told, seen: Seen | None = None, **more: Any) -> JudgedTest:
    if seen is not None:
        more |= {"mean": seen.mean, "low": seen.low, "high": seen.high, "n": seen.pairs}
    more |= {"power": told.power, "seeds_needed": told.seeds, "verdict": told.verdict, "why": told.why}
    return JudgedTest(**test.model_dump() | more)


def _margin(study: StudyFolder, test: ClaimTest) -> float | None:
    """Return the margin of a test that says "same": its own, else that of the study where the outcome is of the same metric."""
    if test.says != "same":
        return None
    alike = test.outcome.rpartition("/")[2] == study.study.primary.rpartition("/")[2]
    return test.margin or (study.study.margin if alike else None)


def _ours(test: ClaimTest, outcome: Outcome, figures: Figures, seen: Seen) -> str:
    unit = unit_named(outcome.unit)
    if test.along_axis:
        ends = [f"{unit.number(figures.means[at])} at {figures.values[at]:g}" for at in (0, -1) if _finite(figures, at)]
        levels = f"{' and '.join(ends)} {unit.name}".strip()
        return f"{outcome.label} {levels}: {_difference(seen, outcome)} from one value to the next".replace("  ", " ")
    if seen.mean is None:
        return f"{outcome.label}: no pair of {test.arm} and {_other(test)}"
    levels = f"{test.arm} {unit.number(figures.means[0])}, {_other(test)} {unit.number(figures.means[1])} {unit.name}"
    return f"{outcome.label} of {levels.strip()}: {_difference(seen, outcome)}"


def _other(test: ClaimTest) -> str:
    """Name what an arm is held against."""
    if test.level is not None:
        return "held against"
    return f"{test.against} in {test.against_outcome}" if test.against_outcome else test.against


def _difference(seen: Seen, outcome: Outcome) -> str:
    unit = unit_named(outcome.unit)
    words = f"{unit.number(seen.mean, signed=True)} {unit.difference}".strip()
    return f"{words} {unit.interval(seen.low, seen.high, signed=True)}".strip()


def _finite(figures: Figures, at: int) -> bool:
    return bool(math.isfinite(figures.means[at]))


def _or_least(mean: float | None) -> float:
    return -math.inf if mean is None else mean
