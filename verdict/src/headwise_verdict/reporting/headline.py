"""The headline of a report (which arms differ, and by how much) and the recommended next step."""

from __future__ import annotations

import math
import statistics

from headwise_verdict.pages.formats import Unit
from headwise_verdict.reporting.outcome_texts import by_effect, label_of, short_names, unit_of
from headwise_verdict.results.analysis_record import Analysis, ArmAnalysis, Difference
from headwise_verdict.results.answer import divergence_sentences, listed, named, spelled
from headwise_verdict.results.intervals import ALPHA
from headwise_verdict.results.joint_flips import seeds_for_a_verdict
from headwise_verdict.results.power import POWER, power_of, seeds_needed

DECIDED = ("better", "worse", "higher", "lower")
# largest number of arms of which each has its own sentence or name; number of seeds beyond which another setting is
# recommended
NAMED, MOST_SEEDS = 3, 100


def headline(analysis: Analysis) -> str:
    """Return the result in sentences: "DropHead raises test accuracy by 6.1 points (95 % CI 2.3 to 9.9; …)."

    Sentences on divergence come first if an arm diverges more or less often, else last. Costs are left out: times
    measured beside other runs are indicative.
    """
    if not analysis.compared:
        return analysis.answer
    sentences = [*_effects(analysis), *_no_effects(analysis)]
    if not analysis.complete:
        sentences[0] = f"So far: {sentences[0]}"
    divergence = divergence_sentences(analysis)
    # that an arm diverges more or less often is the most important result, an open question the least
    first = any(arm.divergence and arm.divergence.verdict != "no evidence" for arm in analysis.compared)
    return " ".join([*divergence, *sentences] if first else [*sentences, *divergence])


def _effects(analysis: Analysis) -> list[str]:
    """Return a sentence for each arm that differs, or for more than three one for each direction."""
    names, outcome = short_names(analysis), label_of(analysis.metric)
    entries = [(names[arm.label], arm.differences[analysis.primary]) for arm in by_effect(analysis)]
    decided = [(name, entry) for name, entry in entries if entry.verdict in DECIDED and entry.mean is not None]
    if len(decided) <= NAMED:
        # the outcome is named once
        return [
            f"{name} {changes(entry)} {'it' if at else outcome} by {amount(entry, analysis)}."
            for at, (name, entry) in enumerate(decided)
        ]
    sentences = []
    for verdict in DECIDED:
        group = [(name, entry) for name, entry in decided if entry.verdict == verdict]
        if not group:
            continue
        name, entry = max(group, key=lambda one: abs(one[1].mean or 0.0))
        if len(group) == 1:
            sentences.append(f"{name} {changes(entry)} {outcome} by {amount(entry, analysis)}.")
            continue
        verb = changes(entry).removesuffix("s")
        count = spelled(len(group)).capitalize()
        sentences.append(f"{count} arms {verb} {outcome}, {name} most: by {amount(entry, analysis)}.")
    return sentences


def changes(entry: Difference) -> str:
    """Return the verb of a difference: "raises" or "lowers"."""
    return "raises" if (entry.mean or 0.0) > 0 else "lowers"


def amount(entry: Difference, analysis: Analysis, also: str = "") -> str:
    """Return the size of a difference: "6.1 points (95 % CI 2.3 to 9.9; 10 paired seeds)".

    The interval is that of the size, so that "lowers" needs no sign.
    """
    unit = _rounded(entry, analysis)
    sign = 1 if (entry.mean or 0.0) > 0 else -1
    ends = sorted(sign * one for one in (entry.low, entry.high) if one is not None)
    low_high = f"95\u00a0% CI {unit.number(ends[0])} to {unit.number(ends[-1])}" if len(ends) > 1 else ""
    pairs = f"{entry.n} {'paired' if entry.paired else 'unpaired'} seed{'s' if entry.n != 1 else ''}"
    size = f"{unit.number(sign * (entry.mean or 0.0))} {unit.difference}".rstrip()
    return f"{size} ({'; '.join(part for part in (low_high, pairs, also) if part)})"


def _no_effects(analysis: Analysis) -> list[str]:
    """Return the sentences on arms that are equivalent, that show no evidence, and that cannot be decided."""
    names = short_names(analysis)
    by_verdict: dict[str, list[ArmAnalysis]] = {}
    for arm in by_effect(analysis):
        by_verdict.setdefault(arm.differences[analysis.primary].verdict, []).append(arm)
    equal, open_, undecided = (by_verdict.get(one, []) for one in ("equivalent", "no evidence", "undecided"))
    outcome = label_of(analysis.metric)
    sentences = []
    if equal:
        verb = "is" if len(equal) == 1 else "are"
        place = "" if set(by_verdict) & set(DECIDED) else f" in {outcome}"
        subject = named([names[arm.label] for arm in equal])
        subject = subject[0].upper() + subject[1:] if len(equal) > NAMED else subject
        sentences.append(f"{subject} {verb} equivalent to {analysis.baseline}{place} within {_margin(analysis)}.")
    if open_ and len(open_) == len(analysis.compared):
        sizes = [arm.differences[analysis.primary] for arm in open_]
        detectable = max((one for one in sizes if one.detectable), key=lambda one: one.detectable or 0.0, default=None)
        words = "" if detectable is None else f" ({power(detectable, analysis).removeprefix('; ')})"
        sentences.append(f"No evidence of a difference in {outcome}{words}.")
    elif open_:
        sentences.append(f"No evidence of a difference for {_others(open_, names)}.")
    if undecided and len(undecided) == len(analysis.compared):
        copies = all(arm.differences[analysis.primary].copies for arm in undecided)
        why = "seeds are copies of one run" if copies else "there are too few pairs of runs"
        sentences.append(f"Whether {outcome} differs cannot be decided: {why}.")
    elif undecided:
        sentences.append(f"Too few pairs of runs to decide {_others(undecided, names)}.")
    return sentences


def power(entry: Difference, analysis: Analysis) -> str:
    """Return what the pairs could have detected, as an addition: "; 80 % power to detect 6.6 points"; or ""."""
    if entry.detectable is None:
        return ""
    unit = _rounded(entry, analysis)
    percent = f"{POWER:.0%}".replace("%", "\u00a0%")
    return f"; {percent} power to detect {unit.number(entry.detectable)} {unit.difference}".rstrip()


def _others(arms: list[ArmAnalysis], names: dict[str, str]) -> str:
    if len(arms) > NAMED:
        return f"the other {spelled(len(arms))} arms"
    return listed([names[arm.label] for arm in arms])


def _rounded(entry: Difference, analysis: Analysis) -> Unit:
    """Return the unit with as many digits as the interval of a difference justifies."""
    unit = unit_of(analysis.metric)
    half = None if entry.low is None or entry.high is None else (entry.high - entry.low) / 2 * unit.factor
    digits = unit.decimals if not half else min(unit.decimals, max(0, 1 - math.floor(math.log10(half))))
    return Unit(unit.factor, unit.name, unit.difference, digits)


def effect(entry: Difference, analysis: Analysis) -> str:
    """Return a difference without its unit, and its interval, in as many digits as the interval justifies."""
    unit = _rounded(entry, analysis)
    parts = [unit.number(entry.mean, signed=True), unit.interval(entry.low, entry.high)]
    return " ".join(part for part in parts if part)


def next_step(analysis: Analysis) -> str:
    """Return what would decide an undecided arm, the smallest number of seeds or another setting; "" if none is."""
    names = short_names(analysis)
    differences = {arm.label: arm.differences[analysis.primary] for arm in analysis.compared}
    # an arm whose runs all diverged has an answer, which more seeds do not change
    # nor do copies of a run have one, which more of them do not give; an arm without pairs needs pairs first
    open_ = {
        label: one
        for label, one in differences.items()
        if one.verdict in ("no evidence", "undecided") and one.n and one.paired and not one.copies
    }
    if not open_ or not analysis.complete:
        return ""
    seeds_run = len(analysis.seeds)
    # the share of seeds that form no pair is assumed to stay the same
    needed = {
        label: math.ceil(seeds * seeds_run / entry.n)
        for label, entry in open_.items()
        if (seeds := seeds_that_decide(entry)) is not None
    }
    within = {label: seeds for label, seeds in needed.items() if seeds <= MOST_SEEDS}
    if not within:
        return (
            f"Next: another setting. More than {MOST_SEEDS} seeds would be needed to decide "
            f"{_several([names[label] for label in open_])} at the difference measured."
        )
    label = min(within, key=lambda one: within[one])
    remaining = len(open_) - len(within)
    others = (
        f" {remaining} {'arm needs' if remaining == 1 else 'arms need'} more than {MOST_SEEDS}." if remaining else ""
    )
    return (
        f"Next: {within[label]} seeds would decide {names[label]}, at the difference measured and with 80\u00a0% "
        f"power.{others}"
    )


def _several(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= NAMED else f"any of {len(names)} arms"


def seeds_that_decide(entry: Difference) -> int | None:
    """Return the number of seeds that would decide the measured difference with 80 % power; None if unknown."""
    values = list(entry.by_seed.values())
    least = seeds_for_a_verdict(ALPHA)
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    if not spread or not entry.mean or entry.low is None or entry.high is None:
        return least if len(values) < least else None
    # the critical |t| of the interval, which includes the correction for all arms
    critical = (entry.high - entry.low) / 2 / (spread / math.sqrt(len(values)))
    size = abs(entry.mean) / spread
    needed = seeds_needed(lambda seeds, bound: power_of(size, seeds, bound), critical, len(values), least)
    return MOST_SEEDS + 1 if needed is None else needed


def _margin(analysis: Analysis) -> str:
    unit = unit_of(analysis.metric)
    return f"±{unit.number(analysis.margin)} {unit.difference}".rstrip()
