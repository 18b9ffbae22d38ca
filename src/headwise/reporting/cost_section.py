"""The section of a report on the primary outcome against the costs of the arms."""

from __future__ import annotations

from headwise.pages.formats import mebibytes, milliseconds
from headwise.pages.line_charts import against_cost
from headwise.pages.shell import Cell, Column, Section, figure, grid, join, table
from headwise.reporting.answer_table import figure_cell
from headwise.reporting.outcome_texts import short_names, shown, titled, unit_of
from headwise.results.analysis_record import Analysis

# name, label and factor of the costs to draw, if measured and different between arms
COSTS = (
    ("seconds_per_step", "time per step (ms)", 1e3),
    ("inference_seconds_per_example", "inference, time per example (ms)", 1e3),
    ("peak_memory_bytes", "peak memory (MiB)", 2.0**-20),
    ("flops_per_step", "operations per step (10⁹)", 1e-9),
    ("parameters", "parameters (10³)", 1e-3),
)


def cost_section(analysis: Analysis) -> list[Section]:
    """Return the section on costs; empty if no cost was measured or the baseline is the only arm."""
    measured = [cost for cost in COSTS if any(arm.costs.get(cost[0]) is not None for arm in analysis.arms)]
    if not measured or not analysis.compared:
        return []
    charts = [_chart(analysis, *cost) for cost in measured if _varies(analysis, cost[0])]
    indicative = (
        " Other runs shared the processor while these were measured: they are indicative."
        if analysis.cost_is_indicative
        else ""
    )
    intro = f"Medians over seeds.{indicative}"
    body = join(grid(charts, wide=True), _table(analysis, measured))
    return [Section("Outcome against cost", body, intro)]


def _varies(analysis: Analysis, name: str) -> bool:
    costs = {arm.costs.get(name) for arm in analysis.arms} - {None}
    return len(costs) > 1


def _chart(analysis: Analysis, name: str, words: str, factor: float):  # type: ignore[no-untyped-def]
    unit, rows, names = unit_of(analysis.metric), [], short_names(analysis)
    for arm in analysis.arms:
        cost, outcome = arm.costs.get(name), arm.metrics[analysis.primary]
        if cost is None or outcome.mean is None:
            continue
        ends = {key: shown(one, unit.factor) for key, one in (("low", outcome.low), ("high", outcome.high))}
        role = "baseline" if arm.label == analysis.baseline else "arm"
        row = {
            "label": arm.label,
            "name": names[arm.label],
            "role": role,
            "x": cost * factor,
            "mean": shown(outcome.mean, unit.factor),
        }
        rows.append(row | ends)
    return figure(
        against_cost(rows, x=f"{words}, ← cheaper", y=titled(analysis.metric)),
        name=f"{analysis.metric.label} against {words}",
    )


def _table(analysis: Analysis, measured: list[tuple[str, str, float]]):  # type: ignore[no-untyped-def]
    unit = unit_of(analysis.metric)
    columns = [Column("arm"), Column(analysis.metric.label, unit.name, number=True)]
    columns += [Column(words.partition(" (")[0], number=True) for _, words, _ in measured]
    rows = []
    for arm in analysis.arms:
        mean = arm.metrics[analysis.primary].mean
        cells = [Cell(arm.label), figure_cell(unit.number(mean), mean, arm.all_diverged)]
        rows.append([*cells, *(_cost(name, arm.costs.get(name), arm.all_diverged) for name, _, _ in measured)])
    return table(columns, rows, caption="What every arm costs")


def _cost(name: str, value: float | None, diverged: bool) -> Cell:
    if value is None:
        return figure_cell(None, None, diverged)
    if "seconds" in name:
        return Cell(milliseconds(value), value)
    return Cell(mebibytes(value) if name.endswith("bytes") else f"{value:,.0f}", value)
