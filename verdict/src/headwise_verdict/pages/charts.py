"""The heat maps, attention maps and pair plots of the reports, as Vega-Lite dictionaries."""

from __future__ import annotations

import functools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

ROW = 22  # pixels of a heat map's row
NARROW_LABELS = 110  # the most pixels of an axis label, so that a chart stays legible at 400 px

# the fields of one mark of a chart, by name
Row = Mapping[str, Any]


def specification(build: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Return a wrapper of a function that builds an Altair chart, which returns the Vega-Lite dictionary instead.

    It skips Altair's validation, which makes it six times faster; the tests validate a chart of each kind.
    """

    @functools.wraps(build)
    def specify(*arguments: Any, **settings: Any) -> dict[str, Any]:
        with import_module("altair.utils.schemapi").debug_mode(False):
            dictionary: dict[str, Any] = build(*arguments, **settings).to_dict(validate=False)
        if "datasets" in dictionary:
            dictionary["datasets"] = {name: list(rows) for name, rows in dictionary["datasets"].items()}
        return dictionary

    return specify


def chart_of(alt: Any, rows: Iterable[Row]) -> Any:
    """Return a chart without a mark of `rows`, as a tuple because Altair copies a list for every layer."""
    return alt.Chart(alt.InlineData(values=tuple(rows)))


@specification
def heat_map(
    rows: Iterable[Row],
    *,
    x: str = "head",
    y: str = "layer",
    value: str = "value",
    value_title: str = "value",
    legend_title: str | None = None,
    domain: tuple[float, float] | None = None,
    tooltip: Sequence[str] = (),
    reading: str | None = None,
    packed: bool = False,
    diverging: bool = False,
    label_limit: int = NARROW_LABELS,
    y_order: list[str] | None = None,
    mark: str | None = None,
) -> Any:
    """Return a heat map of `rows` (dictionaries), by default layer × head; cells without a row stay empty.

    Like all charts here it is a Vega-Lite dictionary.

    Args:
        rows: one dictionary for each cell; a list under "spectrum" is drawn below the chart for the cell under the
            pointer if the figure has `trace`.
        x: the field of the columns.
        y: the field of the rows.
        value: the field of the colour.
        value_title: the name of the value on hover and, without `legend_title`, above the colours.
        legend_title: the name above the colours.
        domain: the ends of the colour scale; by default it spans all readings.
        tooltip: further fields to show on hover.
        reading: a numeric field (the step), of which a slider chooses one value to show.
        packed: store the values along x, or along the readings, as one list for each of the other cells. The chart has
            a tenth of the size, and no further fields.
        diverging: use colours for differences; `domain` should be symmetric.
        label_limit: the most pixels of the labels of y.
        y_order: the order of the values of y.
        mark: a field whose text is written into the cells.
    """
    alt = import_module("altair")
    rows, steps = _with_positions(rows, reading)
    along = reading or x
    base = chart_of(alt, _in_lists(rows, along, value) if packed else rows)
    if reading:
        last = max(len(steps) - 1, 0)
        slider = alt.binding_range(min=0, max=last, step=1, name=f"{reading} ")
        base = base.add_params(alt.param(name="position", value=last, bind=slider))
        base = base if packed else base.transform_filter("datum.position == position")
    if packed:
        base = _out_of_lists(base, along, _in_order(rows, along), value, "position" if reading else None)
    fields = [x, y, *tooltip] + ([reading] if reading else [])
    chart = base.mark_rect(cursor="crosshair").encode(
        x=_band(alt.X, x, rows, alt.Axis(labelAngle=0, labelOverlap=True, domain=False, ticks=False)),
        y=_band(alt.Y, y, rows, alt.Axis(labelLimit=label_limit, domain=False, ticks=False), y_order),
        color=_ramp(
            alt, value, domain or _range(rows, value), value_title if legend_title is None else legend_title, diverging
        ),
        tooltip=[alt.Tooltip(field=name, title=name, type="nominal") for name in fields]
        + [alt.Tooltip(field=value, title=value_title, type="quantitative", format=".4g")],
    )
    if mark:
        # the ends of the scale are dark
        ends = max(map(abs, domain or _range(rows, value)))
        ink = alt.condition(f"abs(datum['{value}']) > {0.75 * ends}", alt.value("white"), alt.value("var(--ink)"))
        text = base.mark_text(fontSize=11).encode(
            x=chart.encoding.x, y=chart.encoding.y, text=alt.Text(field=mark, type="nominal"), color=ink
        )
        chart = alt.layer(chart, text)
    chart = chart.properties(width="container", height=max(ROW * len({row[y] for row in rows}), 60))
    if reading:
        title = alt.Title(text=alt.expr(f"'{reading} ' + {steps}[position]"), anchor="start", fontSize=12)
        chart = chart.properties(title=title)
    return chart


def _band(channel: Any, name: str, rows: Iterable[Row], axis: Any, order: list[str] | None = None) -> Any:
    return channel(field=name, type="ordinal", title=name, sort=order or _in_order(rows, name), axis=axis)


def _ramp(alt: Any, value: str, domain: tuple[float, float], title: str, diverging: bool) -> Any:
    legend = alt.Legend(
        title=title or None,
        orient="top",
        gradientLength=150,
        gradientThickness=9,
        titleLimit=300,
        format=digits_of(domain),
        tickCount=3,
    )
    scale = alt.Scale(scheme="blueorange" if diverging else "cividis", domain=list(domain), clamp=True)
    return alt.Color(field=value, type="quantitative", scale=scale, legend=legend)


def _range(rows: Iterable[Row], value: str) -> tuple[float, float]:
    numbers = [row[value] for row in rows if row.get(value) is not None]
    return (min(numbers), max(numbers)) if numbers else (0.0, 1.0)


def robust_range(values: Sequence[float]) -> tuple[float, float]:
    """Return a range of colours that one outlier does not flatten: that of the values within three quartile ranges.

    The range is that of all values if fewer than eight are given or half of them are equal; it is never empty.
    """
    if not values:
        return (0.0, 1.0)
    low, high = min(values), max(values)
    if len(values) >= 8:
        first, _, third = statistics.quantiles(values, n=4)
        reach = 3 * (third - first)
        if reach > 0:
            low = min(value for value in values if value >= first - reach)
            high = max(value for value in values if value <= third + reach)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def beyond(values: Sequence[float], domain: tuple[float, float]) -> str:
    """Return the sentence on values that have the colour of an end of the range, or ""."""
    above, below = sum(value > domain[1] for value in values), sum(value < domain[0] for value in values)
    parts = [f"{above} above (to {max(values):.4g})"] if above else []
    parts += [f"{below} below (to {min(values):.4g})"] if below else []
    return f"The colour scale covers most values; beyond it: {' and '.join(parts)}." if parts else ""


def robust_heat_map(rows: Sequence[Row], *, value_title: str) -> tuple[Any, str]:
    """Return a heat map whose colours end at `robust_range`, and the sentence on the values beyond."""
    values = [row["value"] for row in rows if row["value"] is not None]
    domain = robust_range(values)
    return heat_map(rows, value_title=value_title, legend_title="", domain=domain), beyond(values, domain)


def around_zero(rows: Iterable[Row]) -> dict[str, Any]:
    """Return the settings of a heat map of differences, whose colours span as much below 0 as above."""
    farthest = max((abs(row["value"]) for row in rows), default=0.0) or 1.0
    return {"domain": (-farthest, farthest), "diverging": True}


def digits_of(domain: tuple[float, float]) -> str:
    """Return the format that distinguishes the ends of a range: ".2r" for 0.1 to 0.9, ".5r" for 0.99981 to 0.99989."""
    low, high = domain
    largest, width = max(abs(low), abs(high)), high - low
    if not largest or not width:
        return ".3~r"
    digits = min(7, max(2, 2 + math.ceil(math.log10(largest / width))))
    return f".{digits}~{'e' if largest >= 1e5 or largest < 1e-4 else 'r'}"


def _in_order(rows: Iterable[Row], name: str) -> list[Any]:
    """Return the values of a field with numbers in numeric order: "9 · 11" before "10 · 2"."""

    def parts(value: object) -> list[tuple[int, int, str]]:
        return [
            (0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", str(value)) if part
        ]

    return sorted({row[name] for row in rows}, key=parts)


def _with_positions(rows: Iterable[Row], reading: str | None) -> tuple[list[dict[str, Any]], list[Any]]:
    placed = [dict(row) for row in rows]
    steps = sorted({row[reading] for row in placed}) if reading else []
    for row in placed:
        if reading:
            row["position"] = steps.index(row[reading])
    return placed, steps


def _in_lists(rows: Sequence[Row], along: str, value: str) -> list[dict[str, Any]]:
    """Return one row for each combination of the other fields, with its values along one field as a list.

    The list has None for missing rows.
    """
    order = {key: index for index, key in enumerate(_in_order(rows, along))}
    cells: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        cell = tuple((name, item) for name, item in row.items() if name not in (along, value, "position"))
        cells.setdefault(cell, [None] * len(order))[order[row[along]]] = row[value]
    return [dict(cell) | {"values": values} for cell, values in cells.items()]


def _out_of_lists(chart: Any, along: str, order: list[Any], value: str, position: str | None) -> Any:
    """Return the chart with the lists of `_in_lists` expanded to rows: all values, or those at a position."""
    steps = json.dumps(order)
    if position:
        chart = chart.transform_calculate(**{value: f"datum.values[{position}]", along: f"{steps}[{position}]"})
    else:
        chart = chart.transform_calculate(all=steps).transform_flatten(["values", "all"], [value, along])
    return chart.transform_filter(f"isValid(datum.{value})")


# pixels of a row of attention maps
QUERY_ROW = 11


@specification
def attention_maps(heads: Sequence[Sequence[Sequence[float]]], *, top: float) -> Any:
    """Return the attention maps of heads next to each other, queries from top to bottom and keys from left to right.

    `heads` are lists of queries, each a list of weights by key. The colour scale of the weights is from 0 to `top`; an
    empty column separates the heads.
    """
    alt = import_module("altair")
    queries, keys = len(heads[0]), len(heads[0][0])
    step = keys + 1
    rows = [
        {"head": head, "query": query, "weights": list(weights)}
        for head, maps in enumerate(heads)
        for query, weights in enumerate(maps)
    ]
    base = chart_of(alt, rows).transform_calculate(key=f"sequence({keys})")
    base = base.transform_flatten(["weights", "key"], ["weight", "key"])
    base = base.transform_calculate(place=f"datum.head * {step} + datum.key")
    middles = [head * step + keys // 2 for head in range(len(heads))]
    places = alt.Scale(domain=list(range(len(heads) * step - 1)), paddingInner=0)
    plain = {"domain": False, "ticks": False}
    named = alt.Axis(
        values=middles, labelExpr=f"'head ' + floor(datum.value / {step})", labelAngle=0, labelOverlap=False, **plain
    )
    across = alt.X("place:O", title="key, by head", scale=places, axis=named)
    down = alt.Y("query:O", scale=alt.Scale(paddingInner=0), axis=alt.Axis(labelOverlap=True, **plain))
    legend = alt.Legend(title="weight", orient="top", gradientLength=110, gradientThickness=9)
    colour = alt.Color("weight:Q", scale=alt.Scale(scheme="cividis", domain=[0.0, top]), legend=legend)
    words = ["head:N", "query:N", "key:N", alt.Tooltip("weight:Q", format=".3g")]
    chart = base.mark_rect(cursor="crosshair").encode(x=across, y=down, color=colour, tooltip=words)
    return chart.properties(width="container", height=max(QUERY_ROW * queries, 60))


@specification
def pairs_of(rows: Sequence[Row], *, x: str, y: str, series: str | None = None) -> Any:
    """Return a scatter plot of the numeric fields x and y with the line of equality, coloured by `series`."""
    alt = import_module("altair")
    flat = [{"x": row[x], "y": row[y], "series": str(row[series]) if series else ""} for row in rows]
    largest = max((max(row["x"], row["y"]) for row in flat), default=1.0) or 1.0
    names = list(dict.fromkeys(row["series"] for row in flat))
    scale = alt.Scale(domain=[0, 1.03 * largest], nice=False)
    place = {
        "x": alt.X("x:Q", title=x, scale=scale, axis=alt.Axis(tickCount=5, grid=False)),
        "y": alt.Y("y:Q", title=y, scale=scale, axis=alt.Axis(tickCount=5)),
    }
    legend = alt.Legend(title=series, orient="top", columns=2, labelLimit=170) if len(names) > 1 else None
    style = {"scale": alt.Scale(domain=names), "legend": legend}
    line = chart_of(alt, [{"x": 0, "y": 0}, {"x": largest, "y": largest}])
    points = chart_of(alt, flat).mark_point(filled=True, size=22, opacity=0.6)
    words = ["series:N"] if series else []
    words += [alt.Tooltip(f"{name}:Q", title=title, format=".4g") for name, title in (("x", x), ("y", y))]
    return alt.layer(
        line.mark_line(strokeWidth=1, color="var(--grey)", strokeDash=[4, 3]).encode(**place),
        points.encode(
            **place, color=alt.Color("series:N", **style), shape=alt.Shape("series:N", **style), tooltip=words
        ),
    ).properties(width="container", height=300)
