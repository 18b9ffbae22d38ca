"""The main table of a report: every arm against the baseline, with its verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from headwise_verdict.pages.formats import MINUS, Unit, mebibytes, milliseconds, p_value
from headwise_verdict.pages.shell import Column, TableCell, prose, table
from headwise_verdict.reporting.outcome_texts import SIGNS, brief_names, by_effect, has_pairs, label_of, unit_of
from headwise_verdict.results.analysis_record import Analysis, ArmAnalysis, Difference, RunCounts
from headwise_verdict.results.records import Outcome

# costs of an arm with the note and the format of their column
COSTS: dict[str, tuple[str, str, Callable[[float | None], str | None]]] = {
    "seconds_per_step": ("time per step", "median", milliseconds),
    "peak_memory_bytes": ("memory", "peak, median", mebibytes),
}
FEW = 2  # largest number of diverged runs that are listed one by one
INTERVAL = "[95\u00a0%]"


def gap_of(analysis: Analysis) -> Outcome | None:
    """Return the generalisation gap of the primary outcome, or None if the runs did not record it."""
    gaps = (one for one in analysis.outcomes.values() if one.kind == "gap")
    # the name of a metric may contain slashes
    return next((one for one in gaps if analysis.primary.endswith(one.name.removeprefix("gap"))), None)


def measured_costs(analysis: Analysis) -> list[str]:
    """Return the costs of the main table that an arm has; a script's memory and a table's costs are not measured."""
    return [name for name in COSTS if any(arm.costs.get(name) is not None for arm in analysis.arms)]


def answer_table(analysis: Analysis, tuned: Mapping[str, str] | None = None) -> Any:
    """Return a table of one row per arm, the best first: difference, verdict, outcome, gap, costs and runs.

    `tuned` describes, by label, how an arm was chosen.
    """
    gap, costs = gap_of(analysis), measured_costs(analysis)
    columns, rows = _compared(analysis, analysis.metric, analysis.metric.label)
    columns += [Column("gap", f"train {MINUS} test, {unit_of(gap).difference}", number=True)] if gap else []
    columns += [*(_cost_column(name, analysis) for name in costs), Column("runs")]
    for arm, cells in rows:
        cells[0] = replace(cells[0], small=(tuned or {}).get(arm.label, ""))
        if gap:
            value = arm.metrics[gap.name].mean
            cells.append(figure_cell(unit_of(gap).number(value, signed=True), value, arm.all_diverged))
        for name in costs:
            value = arm.costs.get(name)
            cells.append(figure_cell(COSTS[name][2](value), value, arm.all_diverged))
        counts, steps = run_counts(arm.runs)
        cells.append(TableCell(counts, small="; ".join(steps)))
    return table(columns, [cells for _, cells in rows], marked=[0], caption="Every arm against the baseline")


def outcome_table(analysis: Analysis, outcome: Outcome) -> Any:
    """Return a table of one row per arm for one outcome."""
    columns, rows = _compared(analysis, outcome, label_of(outcome))
    return table(columns, [cells for _, cells in rows], marked=[0], caption=label_of(outcome))


def _compared(
    analysis: Analysis, outcome: Outcome, label: str
) -> tuple[list[Column], list[tuple[ArmAnalysis, list[TableCell]]]]:
    """Return the columns and rows of all arms in one outcome, the baseline first, then the best."""
    unit, detectable, names = unit_of(outcome), has_detectable(analysis, outcome.name), brief_names(analysis)
    figures = Column(label, f"{unit.name} {INTERVAL}".strip(), number=True)
    rows = []
    for arm in (*(arm for arm in analysis.arms if arm.label == analysis.baseline), *by_effect(analysis)):
        mean, diverged = arm.metrics[outcome.name], arm.all_diverged
        heading = TableCell(arm.label, brief=names[arm.label])
        entry = arm.differences.get(outcome.name)
        figure = figure_cell(unit.number(mean.mean), mean.mean, diverged, unit.interval(mean.low, mean.high))
        rows.append((arm, [heading, *difference_cells(entry, unit, diverged, detectable), figure]))
    differences = difference_columns(unit, detectable, has_pairs(analysis, outcome.name))
    return [Column("arm"), *differences, figures], rows


def has_detectable(analysis: Analysis, outcome: str) -> bool:
    """Return whether an arm without evidence has a difference that these seeds could have detected."""
    entries = [arm.differences[outcome] for arm in analysis.compared if outcome in arm.differences]
    return any(_detectable(entry) is not None for entry in entries)


def _detectable(entry: Difference) -> float | None:
    return entry.detectable if entry.verdict == "no evidence" else None


def difference_columns(unit: Unit, detectable: bool = False, paired: bool = True) -> list[Column]:
    """Return the columns of a difference, which comes first, to be visible on a small screen."""
    kind = f"{', '.join(filter(None, ['paired' if paired else 'of means', unit.difference]))} {INTERVAL}"
    power = [Column("detectable", f"{unit.difference}, 80\u00a0% power".strip(", "), number=True)] if detectable else []
    return [Column("difference", kind, number=True), Column("verdict"), *power, Column("corrected p", number=True)]


def difference_cells(
    entry: Difference | None, unit: Unit, diverged: bool = False, detectable: bool = False
) -> list[TableCell]:
    """Return the cells of a paired difference, as `difference_columns` names them; dashes for the baseline."""
    if entry is None:
        return [TableCell("–", value=None), TableCell("–"), *([TableCell("–")] if detectable else []), TableCell("–")]
    size = _detectable(entry)
    power = [TableCell(unit.number(size) or "–", size)] if detectable else []
    tone = entry.verdict if entry.verdict in ("better", "worse", "equivalent") else "wrapped"
    interval = unit.interval(entry.low, entry.high, signed=True)
    return [
        figure_cell(unit.number(entry.mean, signed=True), entry.mean, diverged, interval),
        TableCell(SIGNS.get(entry.verdict, "") + plain_verdict(entry, unit), tone=tone),
        *power,
        figure_cell(p_value(entry.p_corrected), entry.p_corrected, diverged),
    ]


def plain_verdict(entry: Difference, unit: Unit) -> str:
    """Return the verdict in words, with the margin within which an arm is equivalent."""
    if entry.verdict == "equivalent" and entry.within is not None:
        return entry.verdict_text.replace("equivalent", f"equivalent within ±{unit.number(entry.within)}", 1)
    return entry.verdict_text


def figure_cell(text: str | None, value: float | None, diverged: bool, small: str = "") -> TableCell:
    """Return the cell of a figure, or "diverged" if there is none because every run diverged."""
    return TableCell("diverged", tone="diverged") if text is None and diverged else TableCell(text, value, small=small)


def run_counts(runs: RunCounts) -> tuple[str, list[str]]:
    """Return how many runs finished, and phrases on those that diverged or are missing."""
    steps = [f"seed {run.seed} diverged at step {'?' if run.step is None else run.step}" for run in runs.diverged]
    if len(steps) > FEW:
        steps = [f"{len(steps)} diverged"]
    missing = [f"{len(runs.missing)} missing"] if runs.missing else []
    return f"{runs.finished} of {runs.asked}", steps + missing


def notes_on_table(analysis: Analysis) -> Any:
    """Return the note on what each column means and where its figures come from."""
    words = analysis.statistics
    return prose(
        [
            f"Differences: {words['difference']}. Intervals: {words['interval']}. p: {words['p']}; correction: "
            f"{words['correction']}. Verdict: {words['verdict']}. Detectable: {words['power']}. Within: the "
            "smallest margin that two one-sided tests support. Each figure comes from the result.json of the runs "
            "listed under Runs; table.csv, table.md and table.tex hold the same table, runs.csv all outcomes of each "
            "run, epochs.csv those of each epoch or step, and analysis.json the whole analysis.",
            *_pairing(analysis),
        ],
        kind="note",
    )


def _pairing(analysis: Analysis) -> list[str]:
    gains = [one for arm in analysis.compared if (one := arm.differences[analysis.primary].pairing) is not None]
    if not gains:
        return []
    low, high = min(gains), max(gains)
    times = f"{low:.2g}" if f"{low:.2g}" == f"{high:.2g}" else f"{low:.2g} to {high:.2g}"
    return [f"Gain from pairing: without shared seeds, the same precision would take {times} times as many seeds."]


def _cost_column(name: str, analysis: Analysis) -> Column:
    heading, note, _ = COSTS[name]
    indicative = ", indicative" if name == "seconds_per_step" and analysis.cost_is_indicative else ""
    return Column(heading, note + indicative, number=True)
