"""Say what an outcome is called in a report and how its figures are written."""

from __future__ import annotations

from headwise.pages.formats import MINUS, Unit, p_value, unit_named
from headwise.results.analysis_record import Analysis, Difference
from headwise.results.records import Outcome

SIGNS = {"better": "▲ ", "worse": "▼ ", "higher": "↑ ", "lower": "↓ ", "equivalent": "＝ "}


def unit_of(outcome: Outcome) -> Unit:
    """Return how figures of this outcome are written."""
    return unit_named(outcome.unit)


def label_of(outcome: Outcome) -> str:
    """Return an outcome's name in words; a gap says what is taken from what."""
    if outcome.kind == "gap":
        return f"{outcome.label.removeprefix('gap ')} gap, train {MINUS} test"
    return outcome.label


def titled(outcome: Outcome, *, difference: bool = False) -> str:
    """Return an outcome's name with its unit, for an axis."""
    unit = unit_of(outcome)
    name = unit.difference if difference else unit.name
    start = "difference in " if difference else ""
    return f"{start}{label_of(outcome)} ({name})" if name else f"{start}{label_of(outcome)}"


def shown(value: float | None, factor: float) -> float | None:
    """Return a figure in the unit that is drawn, without the digits that are rounding."""
    return None if value is None else float(f"{value * factor:.7g}")


def qualities(analysis: Analysis) -> list[Outcome]:
    """Return the outcomes that are no figures of heads, the primary one first."""
    return [one for one in analysis.outcomes.values() if one.kind != "heads"]


def differences_of(analysis: Analysis, outcome: str) -> list[tuple[str, Difference]]:
    """Return the arms other than the baseline with their differences in an outcome."""
    return [(arm.label, arm.differences[outcome]) for arm in analysis.compared]


def forest_row(label: str, entry: Difference, outcome: Outcome) -> dict:
    """Return the row of a forest plot: the difference in the unit shown, its numbers, and the dot of every seed."""
    unit = unit_of(outcome)
    scaled = {
        key: shown(value, unit.factor)
        for key, value in (("mean", entry.mean), ("low", entry.low), ("high", entry.high))
    }
    short = unit.number(entry.mean, signed=True) or ""
    number = f"{short} {unit.interval(entry.low, entry.high, signed=True)}".strip()
    words = f"{number}, corrected p {p_value(entry.p_corrected)}, {entry.n} pairs: {entry.verdict_text}"
    seeds = [{"seed": seed, "value": shown(value, unit.factor)} for seed, value in entry.by_seed.items()]
    row = {"label": label, "verdict": entry.verdict, "words": words, "number": number, "short": short, "seeds": seeds}
    return row | scaled
