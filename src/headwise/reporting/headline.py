"""The headline of a report (which arms differ, by how much and at what cost) and the recommended next step."""

from __future__ import annotations

import math
import statistics

from headwise.reporting.outcome_texts import by_effect, short_names, unit_of
from headwise.results.analysis_record import Analysis, ArmAnalysis, Difference
from headwise.results.answer import divergence_sentences
from headwise.results.intervals import ALPHA
from headwise.results.joint_flips import seeds_for_a_verdict
from headwise.results.power import POWER, power_of, seeds_needed

DECIDED = ("better", "worse", "higher", "lower")
# largest number of arms listed with their effect; number of seeds beyond which another setting is recommended
NAMED, MOST_SEEDS = 3, 100
# percent of the baseline's time: a smaller difference in cost counts as none
SAME_TIME = 2


def headline(analysis: Analysis) -> str:
    """Return the result in one line: "DropHead +6.1 points [2.3, 9.9], 15 % more time a step".

    Sentences on divergence come first if an arm diverges more or less often, else last.
    """
    if not analysis.compared:
        return analysis.answer
    names, entries = short_names(analysis), [(arm, arm.differences[analysis.primary]) for arm in by_effect(analysis)]
    decided = [(arm, entry) for arm, entry in entries if entry.verdict in DECIDED]
    effects = [
        f"{_named(names[arm.label])} {effect(entry, analysis)}{_price(arm, analysis)}" for arm, entry in decided[:NAMED]
    ]
    further = [f"{len(decided) - NAMED} more arms differ"] if len(decided) > NAMED else []
    equal_names = [names[arm.label] for arm, entry in entries if entry.verdict == "equivalent"]
    equivalent = [f"{', '.join(equal_names)}: no difference within {_margin(analysis)}"] if equal_names else []
    start = "" if analysis.complete else "So far: "
    words = "; ".join([*effects, *further, *equivalent]) or _nothing_shown(analysis, [entry for _, entry in entries])
    place = f" (in {analysis.metric.label})" if effects or equivalent else ""
    divergence = divergence_sentences(analysis)
    # that an arm diverges more or less often is the most important result, an open question the least
    first = any(arm.divergence and arm.divergence.verdict != "no evidence" for arm in analysis.compared)
    result = f"{start}{words}{place}."
    return " ".join([*divergence, result] if first else [result, *divergence])


def effect(entry: Difference, analysis: Analysis, *, unit_words: bool = True) -> str:
    """Return a difference with its unit (or without) and its interval, in as many digits as the interval justifies."""
    unit = unit_of(analysis.metric)
    half = None if entry.low is None or entry.high is None else (entry.high - entry.low) / 2 * unit.factor
    digits = unit.decimals if not half else min(unit.decimals, max(0, 1 - math.floor(math.log10(half))))
    rounded = type(unit)(unit.factor, unit.name, unit.difference, digits)
    parts = [
        rounded.number(entry.mean, signed=True),
        unit.difference if unit_words else "",
        rounded.interval(entry.low, entry.high),
    ]
    return " ".join(part for part in parts if part)


def next_step(analysis: Analysis) -> str:
    """Return what would decide an undecided arm, the smallest number of seeds or another setting; "" if none is."""
    names = short_names(analysis)
    differences = {arm.label: arm.differences[analysis.primary] for arm in analysis.compared}
    # an arm whose runs all diverged has an answer, which more seeds do not change
    # nor does an arm of copies have an answer, which more of them do not give
    open_ = {
        label: one
        for label, one in differences.items()
        if one.verdict in ("no evidence", "undecided") and one.n and not one.copies
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


def _named(name: str) -> str:
    """Return a name, with a colon if it has several words: "… | learning_rate=0.01: +1.9 points"."""
    return f"{name}:" if " " in name else name


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


def _price(arm: ArmAnalysis, analysis: Analysis) -> str:
    base = next(one for one in analysis.arms if one.label == analysis.baseline)
    ours, theirs = (one.costs.get("seconds_per_step") for one in (arm, base))
    if not ours or not theirs:
        return ""
    percent = round(100 * (ours / theirs - 1))
    if abs(percent) < SAME_TIME:
        return ", at the same time a step"
    return f", {abs(percent)}\u00a0% {'more' if percent > 0 else 'less'} time a step"


def _nothing_shown(analysis: Analysis, entries: list[Difference]) -> str:
    detectable = [entry.detectable for entry in entries if entry.detectable is not None]
    if all(entry.copies for entry in entries):
        return f"Whether {analysis.metric.label} differs cannot be decided: seeds are copies of one run"
    if all(entry.verdict == "undecided" for entry in entries):
        return f"Too few seeds to decide whether {analysis.metric.label} differs"
    unit = unit_of(analysis.metric)
    size = (
        f"; {unit.number(max(detectable))} {unit.difference}".rstrip()
        + f" would have been seen with {POWER:.0%} power".replace("%", "\u00a0%")
        if detectable
        else ""
    )
    return f"No difference was shown in {analysis.metric.label}{size}"


def _margin(analysis: Analysis) -> str:
    unit = unit_of(analysis.metric)
    return f"±{unit.number(analysis.margin)} {unit.difference}".rstrip()
