"""The sections of a study's page on differences between arms and along an axis."""

from __future__ import annotations

from typing import Any

from headwise.pages.forest import forest, panel
from headwise.pages.formats import p_value
from headwise.pages.line_charts import dose
from headwise.pages.shell import Cell, Column, Section, figure, fold, grid, join, table
from headwise.reporting.answer_table import INTERVAL, outcome_table
from headwise.reporting.outcome_texts import (
    brief_names,
    by_effect,
    differences_of,
    forest_row,
    label_of,
    powers,
    qualities,
    shown,
    titled,
    unit_of,
)
from headwise.results.analysis_record import Analysis, TrendRecord
from headwise.results.folder import StudyFolder
from headwise.results.records import Outcome


def difference_sections(analysis: Analysis) -> list[Section]:
    """Return the forest plot of the primary outcome and, if there are more, the panels and tables of all outcomes."""
    return [*forest_section(analysis), *panels_section(analysis)]


def forest_section(analysis: Analysis, before: Any = "") -> list[Section]:
    """Return the forest plot of the primary outcome, the best arm first, below the markup `before`.

    Empty if no arm has a pair.
    """
    metric = analysis.metric
    differences = differences_of(analysis, metric.name)
    names = brief_names(analysis)
    rows = [forest_row(label, entry, metric, names[label]) for label, entry in differences if entry.mean is not None]
    if not rows:
        return []
    margin = None if analysis.margin is None else analysis.margin * unit_of(metric).factor
    left_out = [label for label, entry in differences if entry.mean is None]
    caption = f"Not drawn, because no pair of runs finished: {', '.join(left_out)}. " if left_out else ""
    caption += (
        "Mean with a joint 95 % interval; dots: seeds. Triangle: a verdict, square: equivalent, circle: not shown, "
        "diamond: too few seeds. "
    )
    caption += f"Shaded: the declared margin, ±{margin:g} {unit_of(metric).difference}." if margin is not None else ""
    chart = forest(rows, title=titled(metric, difference=True), margin=margin, reverse=metric.higher_is_better is False)
    name = f"Paired differences in {metric.label}"
    return [Section("Paired differences", join(before, figure(chart, caption=caption.strip(), name=name)))]


def panels_section(analysis: Analysis) -> list[Section]:
    """Return a panel of every outcome and a table of each but the primary; empty if there is no other outcome."""
    others = [one for one in qualities(analysis) if one.name != analysis.primary]
    if not others or not analysis.compared:
        return []
    panels = [_panel(analysis, one) for one in qualities(analysis)]
    folds = [fold(label_of(one), outcome_table(analysis, one)) for one in others]
    intro = (
        "Every outcome by the same statistics: paired differences with intervals that hold for all arms together. Each "
        "outcome is corrected for the number of arms, not for the number of outcomes. ▲▼ without colour of good or "
        "bad: purple, no direction is good."
    )
    charts = grid([one for one in panels if one is not None], wide=True)
    return [Section("All outcomes", join(charts, *folds, _learned(analysis)), intro)]


def _learned(analysis: Analysis) -> Any:
    """Return the fold on how far the methods' own parameters moved; "" if no method learned any."""
    outcomes = [one for one in analysis.outcomes.values() if one.kind == "methods"]
    arms = [arm for arm in by_effect(analysis) if any(arm.metrics[one.name].n for one in outcomes)]
    if not arms:
        return ""
    columns = [Column("arm"), *(Column(one.label, f"root mean square {INTERVAL}", number=True) for one in outcomes)]
    rows = []
    for arm in arms:
        means = [(arm.metrics[one.name], unit_of(one)) for one in outcomes]
        cells = [
            Cell(unit.number(one.mean) or "–", one.mean, small=unit.interval(one.low, one.high)) for one, unit in means
        ]
        rows.append([Cell(arm.label), *cells])
    return fold("own parameters of the methods", table(columns, rows, caption="How far own parameters moved"))


def _panel(analysis: Analysis, outcome: Outcome):  # type: ignore[no-untyped-def]
    differences = differences_of(analysis, outcome.name)
    names = brief_names(analysis)
    rows = [forest_row(label, entry, outcome, names[label]) for label, entry in differences if entry.mean is not None]
    if not rows:
        return None
    title = unit_of(outcome).difference or "difference"
    arrow = "" if outcome.higher_is_better is None else ", better →"
    chart = panel(rows, title=title + arrow, reverse=outcome.higher_is_better is False)
    return figure(chart, title=label_of(outcome), name=f"Differences in {label_of(outcome)}")


def axis_sections(study: StudyFolder, analysis: Analysis) -> list[Section]:
    """Return a section for each axis; empty if the study has no axis."""
    sections = []
    for axis in dict.fromkeys(trend.axis for trend in analysis.trends):
        trends = [trend for trend in analysis.trends if trend.axis == axis]
        charts = [_chart(study, analysis, trend) for trend in trends if _is_drawn(analysis.outcomes[trend.outcome])]
        intro = (
            f"Every outcome against {axis}: mean and 95 % interval, a dot for each seed; the dashed line is "
            f"{analysis.baseline}. Values stand at equal distances. The trend is the mean over seeds of the slope from "
            "one value to the next, tested by sign flips; Page's test looks at the ranks alone. Neither is corrected "
            "for the number of outcomes."
        )
        sections.append(Section(f"Along {axis}", join(grid(charts, wide=True), _table(analysis, trends)), intro))
    return [*sections, *_critical_section(analysis)]


def _critical_section(analysis: Analysis) -> list[Section]:
    """Return the table of critical learning rates; empty if no rate was swept or no run diverged."""
    if not analysis.critical_rates:
        return []
    columns = [
        Column("sweep"),
        Column("critical rate", "mean [95 %]", number=True),
        Column("against the first", "times [95 %]", number=True),
        Column("p", number=True),
        Column("seeds", number=True),
    ]
    rows = [
        [
            Cell(one.axis),
            Cell(powers(one.mean, one.low, one.high) or None, one.mean),
            Cell(powers(one.difference, one.difference_low, one.difference_high) or None, one.difference),
            Cell(p_value(one.p), one.p),
            Cell(str(one.n), one.n),
        ]
        for one in analysis.critical_rates
    ]
    intro = (
        "How far the learning rate can rise, by seed: halfway, in log10, between the first rate at which the run "
        "diverges and the one below; at the end of the axis where none or all diverge. Sweeps are compared within "
        "seeds by joint sign flips."
    )
    return [Section("Critical learning rate", table(columns, rows, caption="Critical learning rates"), intro)]


def _is_drawn(outcome: Outcome) -> bool:
    # of the heads' outcomes only the mean over all is drawn; layers and single heads are in the table
    return outcome.kind != "heads" or outcome.name.endswith("/mean")


def _chart(study: StudyFolder, analysis: Analysis, trend: TrendRecord):  # type: ignore[no-untyped-def]
    outcome = analysis.outcomes[trend.outcome]
    unit, arms = unit_of(outcome), {arm.label: arm for arm in analysis.arms}
    rows, seeds = [], []
    for value, label in zip(trend.values, trend.arms):
        interval = arms[label].metrics[outcome.name]
        if interval.mean is None:
            continue
        ends = {key: shown(one, unit.factor) for key, one in (("low", interval.low), ("high", interval.high))}
        rows.append({"x": f"{value:g}", "mean": shown(interval.mean, unit.factor), **ends})
        figures = [(seed, study.figure(label, seed, outcome.name)) for seed in study.seeds]
        seeds += [
            {"x": f"{value:g}", "seed": seed, "value": shown(one, unit.factor)}
            for seed, one in figures
            if one is not None
        ]
    base = arms[analysis.baseline].metrics[outcome.name].mean
    chart = dose(rows, x=trend.axis, y=titled(outcome), seeds=seeds, baseline=shown(base, unit.factor))
    return figure(
        chart,
        title=label_of(outcome),
        caption=_caption(trend, analysis),
        name=f"{label_of(outcome)} along {trend.axis}",
    )


def _caption(trend: TrendRecord, analysis: Analysis) -> str:
    if trend.step is None:
        return f"No test: {trend.text}."
    unit = unit_of(analysis.outcomes[trend.outcome])
    place = "inside the axis" if trend.inside else "at its end"
    best = "" if trend.best is None else f" Best at {trend.best:g}, {place}."
    return (
        f"{unit.number(trend.step, signed=True)} {unit.difference} from one value to the next, p "
        f"{p_value(trend.p)}.{best}"
    )


def _table(analysis: Analysis, trends: list[TrendRecord]):  # type: ignore[no-untyped-def]
    columns = [
        Column("outcome"),
        Column("trend", "per value", number=True),
        Column("p", "sign flips", number=True),
        Column("p", "Page", number=True),
        Column("best at", number=True),
        Column("seeds", number=True),
    ]
    rows = []
    for trend in trends:
        outcome = analysis.outcomes[trend.outcome]
        unit = unit_of(outcome)
        step = unit.number(trend.step, signed=True)
        best = (
            Cell("–")
            if trend.best is None
            else Cell(f"{trend.best:g}", trend.best, small="inside" if trend.inside else "at an end")
        )
        cells = [
            Cell(label_of(outcome)),
            Cell(None if step is None else f"{step} {unit.difference}".strip(), trend.step),
        ]
        cells += [Cell(p_value(trend.p), trend.p), Cell(p_value(trend.page), trend.page)]
        rows.append([*cells, best, Cell(str(trend.seeds), trend.seeds)])
    return table(columns, rows, caption=f"Trends along {trends[0].axis}")
