"""The sections of a study's page on differences between arms and along an axis."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from headwise_verdict.pages.charts import chart_of, specification
from headwise_verdict.pages.formats import p_value
from headwise_verdict.pages.line_charts import dose, label_column, spread_axis, text_column
from headwise_verdict.pages.shell import Column, Section, TableCell, figure, fold, grid, join, table
from headwise_verdict.reporting.answer_table import INTERVAL, outcome_table
from headwise_verdict.reporting.outcome_texts import (
    brief_names,
    by_effect,
    differences_of,
    forest_row,
    has_pairs,
    label_of,
    powers,
    qualities,
    shown,
    titled,
    unit_of,
)
from headwise_verdict.results.analysis_record import Analysis, TrendRecord
from headwise_verdict.results.folder import StudyFolder
from headwise_verdict.results.records import Outcome

VERDICTS = ("better", "worse", "higher", "lower", "equivalent", "no evidence", "undecided")
COLOURS = tuple(f"var(--{name})" for name in ("blue", "vermillion", "purple", "purple", "green", "grey", "grey"))
SHAPES = ("triangle-right", "triangle-left", "triangle-up", "triangle-down", "square", "circle", "diamond")
# least number of rows to pixels of a row: on paper, nine rows leave room for their table
HEIGHTS = {1: 52, 6: 42, 8: 34}


@specification
def forest(rows: list[dict[str, Any]], *, title: str, margin: float | None = None, reverse: bool = False) -> Any:
    """Return the paired differences as a forest plot: a dot for each seed, the interval of the mean, and the numbers.

    Labels form a column left of the plot, and numbers one right of it.

    Args:
        rows: each has label, mean, low, high (None without an interval), verdict, number and short (its text with and
            without the interval), words (its tooltip) and seeds: a list of {"seed", "value"}; also `brief`, which
            replaces a label that is too long.
        title: of the axis.
        margin: the differences up to this size, which count as none, are shaded.
        reverse: put lower numbers to the right.
    """
    alt = import_module("altair")
    layers = _points(alt, rows, title, reverse, size=150, width=2.5, ticks=6, numbers=True, margin=margin)
    height = next(height for least, height in reversed(HEIGHTS.items()) if len(rows) >= least)
    chart = alt.layer(*layers, width="container", height=height * len(rows) + 8)
    return chart.resolve_axis(y="independent")


@specification
def panel(rows: list[dict[str, Any]], *, title: str, reverse: bool = False) -> Any:
    """Return a small chart of the rows of `forest`, to put next to those of other outcomes."""
    alt = import_module("altair")
    layers = _points(alt, rows, title, reverse, size=60, width=2, ticks=4)
    return alt.layer(*layers, width="container", height=34 * len(rows) + 6).resolve_axis(y="independent")


def _points(
    alt: Any,
    rows: list[dict[str, Any]],
    title: str,
    reverse: bool,
    *,
    size: int,
    width: float,
    ticks: int,
    numbers: bool = False,
    margin: float | None = None,
) -> list[Any]:
    """Return the layers of a plot of differences: margin, zero, intervals, seeds and means with their labels."""
    base = chart_of(alt, [{key: value for key, value in row.items() if key != "seeds"} for row in rows])
    order = [row["label"] for row in rows]
    y = functools.partial(alt.Y, "label:N", title=None, sort=order, scale=alt.Scale(type="band"))
    scale = alt.Scale(zero=True, nice=True, reverse=reverse)
    x = alt.X("mean:Q", title=title, scale=scale, axis=spread_axis(alt, ticks))
    words = ["label:N", "verdict:N", "words:N"]
    layers = []
    if margin is not None:
        ends = chart_of(alt, [{"from": -margin, "to": margin}]).mark_rect(color="var(--faint)")
        layers.append(ends.encode(x=alt.X("from:Q", title=title), x2=alt.X2("to:Q")))
    zero = chart_of(alt, [{"zero": 0}]).mark_rule(color="var(--ink)", strokeWidth=1)
    layers.append(zero.encode(x=alt.X("zero:Q", title=title)))
    # Vega warns of an infinite extent for a layer without marks, and allows no padding for points alone
    if any(row["low"] is not None for row in rows):
        marks = base.transform_filter("datum.low != null").mark_rule(strokeWidth=width)
        # by conditions, not by the scale of the points: a line would change the symbols of their legend
        tests = [{"test": f"datum.verdict === '{one}'", "value": colour} for one, colour in zip(VERDICTS, COLOURS)]
        colour = alt.ColorValue(condition=tests, value="var(--grey)")
        bars = marks.encode(x=x, x2=alt.X2("high:Q"), y=y(axis=None), color=colour, tooltip=words)
        layers.append(bars.transform_calculate(mean="datum.low"))
    seeds = [{"label": row["label"], **seed} for row in rows for seed in row["seeds"]] if numbers else []
    if seeds:
        dots = chart_of(alt, seeds).mark_circle(size=22, opacity=0.45, color="var(--ink)", yOffset=9)
        told = ["label:N", "seed:N", alt.Tooltip("value:Q", format="+.4g")]
        layers.append(dots.encode(x=alt.X("value:Q", title=title), y=y(axis=None), tooltip=told))
    drawn = [one for one in VERDICTS if numbers and one in {row["verdict"] for row in rows}]
    legend = alt.Legend(title=None, orient="top", values=drawn, symbolSize=90) if drawn else None
    colours, shapes = (alt.Scale(domain=list(VERDICTS), range=list(values)) for values in (COLOURS, SHAPES))
    labels = label_column(alt, {row["label"]: row.get("brief") or row["label"] for row in rows}, small=not numbers)
    points = base.mark_point(filled=True, size=size, opacity=1).encode(
        x=x,
        y=y(axis=labels),
        color=alt.Color("verdict:N", legend=legend, scale=colours),
        shape=alt.Shape("verdict:N", legend=legend, scale=shapes),
        tooltip=words,
    )
    layers.append(points)
    if numbers:
        wide, narrow = ({row["label"]: row[key] for row in rows} for key in ("number", "short"))
        column = text_column(alt, wide, narrow, orient="right")
        layers.append(base.mark_point(opacity=0, size=0).encode(x=x, y=y(axis=column)))
    return layers


def forest_section(analysis: Analysis) -> list[Section]:
    """Return the forest plot of the primary outcome, the best arm first.

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
        "Symbol: mean. " if all(row["low"] is None for row in rows) else "Symbol and bar: mean and 95 % interval. "
    )
    caption += "Small dots: seeds. " if any(row["seeds"] for row in rows) else ""
    caption += f"Shaded: the declared margin, ±{margin:g} {unit_of(metric).difference}." if margin is not None else ""
    chart = forest(rows, title=titled(metric, difference=True), margin=margin, reverse=metric.higher_is_better is False)
    title = "Paired differences" if has_pairs(analysis, metric.name) else "Differences of means"
    return [Section(title, figure(chart, caption=caption.strip(), name=f"{title} in {metric.label}"))]


def panels_section(analysis: Analysis) -> list[Section]:
    """Return a panel of every outcome and a table of each but the primary; empty if there is no other outcome."""
    others = [one for one in qualities(analysis) if one.name != analysis.primary]
    if not others or not analysis.compared:
        return []
    panels = [_panel(analysis, one) for one in qualities(analysis)]
    folds = [fold(label_of(one), outcome_table(analysis, one)) for one in others]
    intro = (
        "Paired differences in every outcome. Intervals hold for all arms together; each outcome is corrected for "
        "the number of arms, not for the number of outcomes. Purple: neither direction is better."
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
            TableCell(unit.number(one.mean) or "–", one.mean, small=unit.interval(one.low, one.high))
            for one, unit in means
        ]
        rows.append([TableCell(arm.label), *cells])
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
            f"{analysis.baseline}. Values are shown at equal distances. The trend is the mean over seeds of the "
            "slope from "
            "one value to the next, tested by sign flips; Page's test uses only the ranks. Neither is corrected "
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
            TableCell(one.axis),
            TableCell(powers(one.mean, one.low, one.high) or None, one.mean),
            TableCell(powers(one.difference, one.difference_low, one.difference_high) or None, one.difference),
            TableCell(p_value(one.p), one.p),
            TableCell(str(one.n), one.n),
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
            TableCell("–")
            if trend.best is None
            else TableCell(f"{trend.best:g}", trend.best, small="inside" if trend.inside else "at an end")
        )
        cells = [
            TableCell(label_of(outcome)),
            TableCell(None if step is None else f"{step} {unit.difference}".strip(), trend.step),
        ]
        cells += [TableCell(p_value(trend.p), trend.p), TableCell(p_value(trend.page), trend.page)]
        rows.append([*cells, best, TableCell(str(trend.seeds), trend.seeds)])
    return table(columns, rows, caption=f"Trends along {trends[0].axis}")
