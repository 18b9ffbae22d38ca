"""Names of outcomes and arms, and formats of figures, as a report writes them."""

from __future__ import annotations

import re

from headwise_verdict.pages.formats import MINUS, Unit, p_value, unit_named
from headwise_verdict.results.analysis_record import Analysis, ArmAnalysis, Difference
from headwise_verdict.results.records import Outcome

SIGNS = {"better": "▲ ", "worse": "▼ ", "higher": "↑ ", "lower": "↓ ", "equivalent": "= "}
# longest name of an arm, in characters, that fits on paper and on a small screen
ROOM = 40


def unit_of(outcome: Outcome) -> Unit:
    """Return the unit in which figures of this outcome are written."""
    return unit_named(outcome.unit)


def label_of(outcome: Outcome) -> str:
    """Return an outcome's name in words; a gap names both of its terms."""
    if outcome.kind == "gap":
        return f"{outcome.label.removeprefix('gap ')} gap, train {MINUS} test"
    return outcome.label


def titled(outcome: Outcome, *, difference: bool = False) -> str:
    """Return the title of an axis: the outcome's name, its unit, and the direction that is better.

    Axes of differences are drawn so that right is better; on vertical axes, up or down is better.
    """
    unit = unit_of(outcome)
    name = unit.difference if difference else unit.name
    start = "difference in " if difference else ""
    words = f"{start}{label_of(outcome)} ({name})" if name else f"{start}{label_of(outcome)}"
    if outcome.higher_is_better is None:
        return words
    arrow = "better →" if difference else "better ↑" if outcome.higher_is_better else "better ↓"
    return f"{words}, {arrow}"


def by_effect(analysis: Analysis) -> list[ArmAnalysis]:
    """Return the arms other than the baseline, the best first; those without a difference come last."""
    sign = 1 if analysis.metric.higher_is_better is False else -1

    def rank(arm: ArmAnalysis) -> tuple[bool, float]:
        mean = arm.differences[analysis.primary].mean
        return (mean is None, sign * (mean or 0.0))

    return sorted(analysis.compared, key=rank)


def short_names(analysis: Analysis) -> dict[str, str]:
    """Return, by label, each arm's name without its settings if no other arm has the same name, else its label."""
    names = {arm.label: re.sub(r"\(.*?\)", "", arm.label) for arm in analysis.arms}
    short = list(names.values())
    return {label: name if short.count(name) == 1 else label for label, name in names.items()}


def brief_names(analysis: Analysis) -> dict[str, str]:
    """Return, by label, a name for places with little space: without settings, then without its middle part.

    Names that are then equal are numbered.
    """
    short = short_names(analysis)
    names = {label: _cut(label if len(label) <= ROOM else short[label]) for label in short}
    cut = list(names.values())
    return {
        label: name if cut.count(name) == 1 else f"{number} {name}"
        for number, (label, name) in enumerate(names.items())
    }


def _cut(name: str) -> str:
    half = ROOM // 2 - 1
    return name if len(name) <= ROOM else f"{name[:half]}…{name[-half:]}"


def shown(value: float | None, factor: float) -> float | None:
    """Return a figure in the displayed unit, without the digits that are rounding errors."""
    return None if value is None else float(f"{value * factor:.7g}")


def powers(mean: float | None, low: float | None, high: float | None) -> str:
    """Return figures given in log10 as powers of ten: "0.012 [0.008, 0.017]"; "" without a mean."""
    if mean is None:
        return ""
    ends = "" if low is None or high is None else f" [{10**low:.2g}, {10**high:.2g}]"
    return f"{10**mean:.2g}{ends}"


def qualities(analysis: Analysis) -> list[Outcome]:
    """Return the outcomes other than statistics of heads and of methods' own parameters, the primary one first."""
    return [one for one in analysis.outcomes.values() if one.kind not in ("heads", "methods")]


def differences_of(analysis: Analysis, outcome: str) -> list[tuple[str, Difference]]:
    """Return the arms other than the baseline with their differences in an outcome, the best primary outcome first."""
    return [(arm.label, arm.differences[outcome]) for arm in by_effect(analysis)]


def has_pairs(analysis: Analysis, outcome: str) -> bool:
    """Return whether an arm is paired with the baseline in an outcome; means are compared of those that are not."""
    entries = [arm.differences[outcome] for arm in analysis.compared if outcome in arm.differences]
    return not entries or any(entry.paired for entry in entries)


def forest_row(label: str, entry: Difference, outcome: Outcome, brief: str) -> dict:
    """Return the row of a forest plot: the difference in the displayed unit, its texts, and a dot per seed.

    `brief` is the arm's name for places with little space.
    """
    unit = unit_of(outcome)
    scaled = {key: shown(getattr(entry, key), unit.factor) for key in ("mean", "low", "high")}
    short = unit.number(entry.mean, signed=True) or ""
    number = f"{short} {unit.interval(entry.low, entry.high, signed=True)}".strip()
    words = f"{number}, corrected p {p_value(entry.p_corrected)}, {entry.n} pairs: {entry.verdict_text}"
    seeds = [{"seed": seed, "value": shown(value, unit.factor)} for seed, value in entry.by_seed.items()]
    names = {"label": label, "brief": brief, "verdict": entry.verdict, "words": words}
    return {**names, "number": number, "short": short, "seeds": seeds, **scaled}
