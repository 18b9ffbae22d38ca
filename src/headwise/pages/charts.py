"""Build the heat maps of the reports; every chart is a Vega-Lite dictionary made by `specification`.

All charts take the width of their box, colour-blind safe colours (Okabe and Ito 2008; heat maps use cividis,
differences blue and orange) and, for what matters, a second mark beside colour (shape, dash or text).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from headwise.files.optional_imports import load

ROW = 22  # pixels of a heat map's row
NARROW_LABELS = 110  # pixels that an axis label may take, so that a chart stays legible at 400 px

# one mark of a chart: its fields by name
Row = Mapping[str, Any]


def specification(build: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Make a function that builds an Altair chart return its Vega-Lite dictionary, six times faster: without Altair's
    validation.

    The tests validate a chart of each kind.
    """

    @functools.wraps(build)
    def specify(*arguments: Any, **settings: Any) -> dict[str, Any]:
        with load("altair.utils.schemapi", "study").debug_mode(False):
            drawn: dict[str, Any] = build(*arguments, **settings).to_dict(validate=False)
        return drawn

    return specify


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

    Like all charts here it is a Vega-Lite dictionary. `tooltip` names further fields to show on hover; a list under
    "spectrum" is drawn below the chart for the cell pointed at when the figure is given `trace`. `reading` names a
    numeric field (the step): a slider then chooses which reading is shown. `packed` writes the values along x, or along
    the readings, as one list for each of the other cells: a tenth of the size, with no other field to show.
    `value_title` names the value on hover and above the colours, there replaced by `legend_title` when it is given.
    `domain` fixes the colour scale; by default it spans all readings. `diverging` colours differences, whose domain
    should be symmetric; `label_limit` is the width that labels of y may take, `y_order` their order, and `mark` a field
    whose text is written into the cells.
    """
    alt = load("altair", "study")
    rows, steps = _with_positions(rows, reading)
    along = reading or x
    base = alt.Chart(alt.InlineData(values=_in_lists(rows, along, value) if packed else rows))
    if reading:
        last = max(len(steps) - 1, 0)
        slider = alt.binding_range(min=0, max=last, step=1, name=f"{reading} ")
        base = base.add_params(alt.param(name="position", value=last, bind=slider))
        base = base if packed else base.transform_filter("datum.position == position")
    if packed:
        base = _out_of_lists(base, along, _in_order(rows, along), value, "position" if reading else None)
    shown = [x, y, *tooltip] + ([reading] if reading else [])
    chart = base.mark_rect(cursor="crosshair").encode(
        x=_band(alt.X, x, rows, alt.Axis(labelAngle=0, labelOverlap=True, domain=False, ticks=False)),
        y=_band(alt.Y, y, rows, alt.Axis(labelLimit=label_limit, domain=False, ticks=False), y_order),
        color=_ramp(
            alt, value, domain or _range(rows, value), value_title if legend_title is None else legend_title, diverging
        ),
        tooltip=[alt.Tooltip(field=name, title=name, type="nominal") for name in shown]
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
    legend = alt.Legend(title=title or None, orient="top", gradientLength=110, gradientThickness=9, titleLimit=300)
    scale = alt.Scale(scheme="blueorange" if diverging else "cividis", domain=list(domain), clamp=True)
    return alt.Color(field=value, type="quantitative", scale=scale, legend=legend)


def _range(rows: Iterable[Row], value: str) -> tuple[float, float]:
    numbers = [row[value] for row in rows if row.get(value) is not None]
    return (min(numbers), max(numbers)) if numbers else (0.0, 1.0)


def _in_order(rows: Iterable[Row], name: str) -> list[Any]:
    """Return the values of a field so that "10 · 2" follows "9 · 11"."""

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
    """Return a row for each cell of the other fields, with its values along one field as a list; None where there was
    no row."""
    order = {at: index for index, at in enumerate(_in_order(rows, along))}
    cells: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        cell = tuple((name, item) for name, item in row.items() if name not in (along, value, "position"))
        cells.setdefault(cell, [None] * len(order))[order[row[along]]] = row[value]
    return [dict(cell) | {"values": values} for cell, values in cells.items()]


def _out_of_lists(chart: Any, along: str, order: list[Any], value: str, position: str | None) -> Any:
    """Return the chart with the lists of `_in_lists` laid out again: all of them, or the one at a position."""
    steps = json.dumps(order)
    if position:
        chart = chart.transform_calculate(**{value: f"datum.values[{position}]", along: f"{steps}[{position}]"})
    else:
        chart = chart.transform_calculate(all=steps).transform_flatten(["values", "all"], [value, along])
    return chart.transform_filter(f"isValid(datum.{value})")
