"""Charts of paired differences: a forest plot with its numbers, and small panels of the same rows."""

from __future__ import annotations

import functools
from typing import Any

from headwise.files.optional_imports import load
from headwise.pages.charts import specification

VERDICTS = ("better", "worse", "higher", "lower", "equivalent", "no evidence", "undecided")
COLOURS = (
    "var(--blue)",
    "var(--vermillion)",
    "var(--purple)",
    "var(--purple)",
    "var(--green)",
    "var(--grey)",
    "var(--grey)",
)
SHAPES = ("triangle-right", "triangle-left", "triangle-up", "triangle-down", "square", "circle", "diamond")
# least number of rows to pixels of a row: on paper, nine rows leave room for their table
HEIGHTS = {1: 52, 6: 42, 8: 38}
# width in pixels below which the numbers beside a label have no interval
NARROW = 430
# pixels of a letter of a label
LETTER = 7


@specification
def forest(rows: list[dict[str, Any]], *, title: str, margin: float | None = None, reverse: bool = False) -> Any:
    """Return the paired differences as a forest plot: a dot for each seed, the interval of the mean, and the numbers.

    Label and number are above their interval, so that the plot keeps its width on a small screen.

    Args:
        rows: each has label, mean, low, high (None without an interval), verdict, number and short (its text with and
            without the interval), words (its tooltip) and seeds: a list of {"seed", "value"}; also `brief`, which
            replaces a label that is too long.
        title: of the axis.
        margin: the differences up to this size, which count as none, are shaded.
        reverse: put lower numbers to the right.
    """
    alt = load("altair", "study")
    flat = [{key: value for key, value in row.items() if key != "seeds"} for row in rows]
    order = [row["label"] for row in rows]
    base = alt.Chart(alt.InlineData(values=flat))
    seeds = [{"label": row["label"], **seed} for row in rows for seed in row["seeds"]]
    # Vega warns of an infinite extent for a layer without marks, and allows no padding for points alone
    intervals = any(row["low"] is not None for row in rows)
    scale = {"scale": alt.Scale(paddingInner=0.2)} if intervals else {}
    y = alt.Y("label", type="nominal", sort=order, axis=None, **scale)
    x = alt.X(
        "mean",
        type="quantitative",
        title=title,
        scale=alt.Scale(zero=True, nice=True, reverse=reverse),
        axis=_ticks(alt),
    )
    words = [alt.Tooltip(name, type="nominal") for name in ("label", "verdict", "words")]
    layers = [_zero(alt, title)]
    if margin is not None:
        layers.insert(0, _margin(alt, margin, title))
    if intervals:
        layers.append(_intervals(base, x, y, _colour(alt), words, 2.5))
    if seeds:
        layers.append(_seeds(alt, seeds, title, y))
    layers.append(
        base.mark_point(filled=True, size=150, opacity=1).encode(
            x=x, y=y, color=_colour(alt), shape=_shape(alt), tooltip=words
        )
    )
    layers += _labels(alt, base, y)
    return alt.layer(*layers).properties(width="container", height=_height(len(order)) * len(order) + 8)


@specification
def panel(rows: list[dict[str, Any]], *, title: str, reverse: bool = False) -> Any:
    """Return a small chart of the rows of `forest`, to put next to those of other outcomes."""
    alt = load("altair", "study")
    flat = [{key: value for key, value in row.items() if key != "seeds"} for row in rows]
    base = alt.Chart(alt.InlineData(values=flat))
    y = alt.Y("label", type="nominal", title=None, sort=[row["label"] for row in rows], axis=None)
    scale = alt.Scale(zero=True, nice=True, reverse=reverse)
    x = alt.X("mean", type="quantitative", title=title, scale=scale, axis=_ticks(alt, 4))
    words = [alt.Tooltip(name, type="nominal") for name in ("label", "verdict", "words")]
    layers = [_zero(alt, title)]
    if any(row["low"] is not None for row in rows):
        layers.append(_intervals(base, x, y, _colour(alt), words, 2))
    points = base.mark_point(filled=True, size=60, opacity=1)
    layers.append(points.encode(x=x, y=y, color=_colour(alt), shape=_shape(alt), tooltip=words))
    name = functools.partial(
        base.transform_calculate(named=_named("width")).mark_text,
        align="left",
        dy=-11,
        fontSize=10.5,
        limit={"expr": "width"},
    )
    left = {"y": y, "x": alt.value(2), "text": "named:N"}
    layers += [name(stroke="var(--paper)", strokeWidth=4).encode(**left), name(color="var(--ink)").encode(**left)]
    return alt.layer(*layers).properties(width="container", height=32 * len(rows) + 6)


def _height(rows: int) -> int:
    return next(height for least, height in reversed(HEIGHTS.items()) if rows >= least)


def _ticks(alt: Any, count: int = 6) -> Any:
    return alt.Axis(tickCount=count)


def _zero(alt: Any, title: str) -> Any:
    zero = alt.Chart(alt.InlineData(values=[{"zero": 0}])).mark_rule(color="var(--ink)", strokeWidth=1)
    return zero.encode(x=alt.X("zero", type="quantitative", title=title))


def _margin(alt: Any, margin: float, title: str) -> Any:
    ends = alt.Chart(alt.InlineData(values=[{"from": -margin, "to": margin}])).mark_rect(color="var(--faint)")
    return ends.encode(x=alt.X("from", type="quantitative", title=title), x2="to:Q")


def _intervals(base: Any, x: Any, y: Any, colour: Any, words: list[Any], width: float) -> Any:
    marks = base.transform_filter("datum.low != null").mark_rule(strokeWidth=width)
    return marks.encode(x=x, x2="high:Q", y=y, color=colour, tooltip=words).transform_calculate(mean="datum.low")


def _seeds(alt: Any, seeds: list[dict[str, Any]], title: str, y: Any) -> Any:
    dots = alt.Chart(alt.InlineData(values=seeds)).mark_circle(size=22, opacity=0.45, color="var(--ink)", yOffset=9)
    tooltips = [alt.Tooltip("label", type="nominal"), alt.Tooltip("seed", type="nominal")]
    tooltips.append(alt.Tooltip("value", type="quantitative", format="+.4g"))
    return dots.encode(x=alt.X("value", type="quantitative", title=title), y=y, tooltip=tooltips)


def _labels(alt: Any, base: Any, y: Any) -> list[Any]:
    narrow = f"width < {NARROW}"
    room = f"width - ({narrow} ? 64 : 190)"
    label = functools.partial(
        base.transform_calculate(named=_named(room)).mark_text,
        align="left",
        dy=-16,
        fontSize=11.5,
        limit={"expr": room},
    )
    number = functools.partial(
        base.transform_calculate(beside=f"{narrow} ? datum.short : datum.number").mark_text,
        align="right",
        dy=-16,
        fontSize=11.5,
    )
    left = {"y": y, "x": alt.value(2), "text": "named:N"}
    right = {"y": y, "x": alt.value("width"), "text": "beside:N"}
    # a background for the labels, so that the zero line passes behind them
    behind = {"stroke": "var(--paper)", "strokeWidth": 5}
    return [
        label(**behind).encode(**left),
        number(**behind).encode(**right),
        label(color="var(--ink)").encode(**left),
        number(color="var(--ink)").encode(**right),
    ]


def _named(room: str) -> str:
    """Return the expression for the label, or the brief label if the label is wider than `room` pixels."""
    return f"{LETTER} * length(datum.label) > {room} ? datum.brief || datum.label : datum.label"


def _colour(alt: Any) -> Any:
    return alt.Color(
        "verdict", type="nominal", legend=None, scale=alt.Scale(domain=list(VERDICTS), range=list(COLOURS))
    )


def _shape(alt: Any) -> Any:
    return alt.Shape("verdict", type="nominal", legend=None, scale=alt.Scale(domain=list(VERDICTS), range=list(SHAPES)))
