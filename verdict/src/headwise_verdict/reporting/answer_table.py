"""The main table of a report: every arm against the baseline, with its verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    metric, gap = analysis.metric, gap_of(analysis)
    unit = unit_of(metric)
    detectable = has_detectable(analysis, metric.name)
    columns = [
        Column("arm"),
        *difference_columns(unit, detectable, has_pairs(analysis, metric.name)),
        Column(metric.label, f"{unit.name} {INTERVAL}".strip(), number=True),
        *([Column("gap", f"train {MINUS} test, {unit_of(gap).difference}", number=True)] if gap else []),
        *(_cost_column(name, analysis) for name in measured_costs(analysis)),
        Column("runs"),
    ]
    base = [arm for arm in analysis.arms if arm.label == analysis.baseline]
    names = brief_names(analysis)
    rows = [
        _row(
            arm,
            analysis,
            unit,
            gap,
            TableCell(arm.label, small=(tuned or {}).get(arm.label, ""), brief=names[arm.label]),
        )
        for arm in (*base, *by_effect(analysis))
    ]
    return table(columns, rows, marked=[0], caption="Every arm against the baseline")


def outcome_table(analysis: Analysis, outcome: Outcome) -> Any:
    """Return a table of one row per arm for one outcome."""
    unit = unit_of(outcome)
    detectable = has_detectable(analysis, outcome.name)
    columns = [
        Column("arm"),
        *difference_columns(unit, detectable, has_pairs(analysis, outcome.name)),
        Column(label_of(outcome), f"{unit.name} {INTERVAL}".strip(), number=True),
    ]
    rows, names = [], brief_names(analysis)
    base = [arm for arm in analysis.arms if arm.label == analysis.baseline]
    for arm in (*base, *by_effect(analysis)):
        mean = arm.metrics[outcome.name]
        cell = figure_cell(unit.number(mean.mean), mean.mean, arm.all_diverged, unit.interval(mean.low, mean.high))
        entry = arm.differences.get(outcome.name)
        rows.append(
            [
                TableCell(arm.label, brief=names[arm.label]),
                *difference_cells(entry, unit, arm.all_diverged, detectable),
                cell,
            ]
        )
    return table(columns, rows, marked=[0], caption=label_of(outcome))


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


def _row(arm: ArmAnalysis, analysis: Analysis, unit: Unit, gap: Outcome | None, heading: TableCell) -> list[TableCell]:
    mean, costs, diverged = arm.metrics[analysis.primary], arm.costs, arm.all_diverged
    counts, steps = run_counts(arm.runs)
    outcome_cell = figure_cell(unit.number(mean.mean), mean.mean, diverged, unit.interval(mean.low, mean.high))
    entry, detectable = arm.differences.get(analysis.primary), has_detectable(analysis, analysis.primary)
    cells = [heading, *difference_cells(entry, unit, diverged, detectable), outcome_cell]
    if gap:
        value = arm.metrics[gap.name].mean
        cells.append(figure_cell(unit_of(gap).number(value, signed=True), value, diverged))
    cells += [
        figure_cell(COSTS[name][2](costs.get(name)), costs.get(name), diverged) for name in measured_costs(analysis)
    ]
    return [*cells, TableCell(counts, small="; ".join(steps))]
