"""Charts of lines (learning curves, plain lines or points, outcomes along an axis) or of rows with columns of text."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from headwise_verdict.pages.charts import Row, chart_of, specification

# width in pixels of a chart's box below which labels are narrow and numbers short
NARROW = 500
# most letters and lines of a label, where there is room and where there is not
WIDE_LABEL, NARROW_LABEL = (34, 2), (20, 3)


def label_column(alt: Any, names: Mapping[str, str], *, small: bool = False) -> Any:
    """Return an axis of labels in lines, narrow in a narrow box and in a small chart; `names` are short forms."""
    wide, narrow = (
        {label: lines_of(label, names.get(label) or label, *room) for label in names}
        for room in (NARROW_LABEL if small else WIDE_LABEL, NARROW_LABEL)
    )
    return text_column(alt, wide, narrow, small=small, orient="left")


def text_column(
    alt: Any, wide: Mapping[str, Any], narrow: Mapping[str, Any], *, small: bool = False, **look: Any
) -> Any:
    """Return an axis whose labels are texts by value, which depend on the width of the chart's box."""
    narrow_or = functools.partial("containerSize()[0] < {} ? {} : {}".format, NARROW)
    choose = f"({narrow_or(json.dumps(narrow), json.dumps(wide))})[datum.value]"
    size, height = (10.5, 11) if small else (11.5, 12.5)
    sizes = {"labelFontSize": {"expr": narrow_or(10.5, size)}, "labelLineHeight": {"expr": narrow_or(11, height)}}
    plain = {"domain": False, "ticks": False, "grid": False, "labelLimit": 0, "labelPadding": 10}
    return alt.Axis(labelExpr=choose, labelColor="var(--ink)", **sizes, **plain, **look)


def lines_of(label: str, brief: str, letters: int, lines: int) -> list[str]:
    """Return a label in lines of at most so many letters, broken before settings and signs; else its short form."""
    for text in (label, brief):
        broken = _broken(text, letters)
        if len(broken) <= lines and max(map(len, broken)) <= letters:
            return broken
    cut = [line if len(line) <= letters else f"{line[: letters - 1]}…" for line in broken]
    return cut if len(cut) <= lines else [*cut[: lines - 1], f"{cut[lines - 1][: letters - 1].rstrip()}…"]


def _broken(text: str, letters: int) -> list[str]:
    found = [""]
    for part in re.split(r"(?<=\s)|(?=\((?!\)))", text):
        # a value parts from its setting only where both do not fit on a line
        for piece in [part] if len(part.rstrip()) <= letters else re.split("(?<==)", part):
            if found[-1] and len(found[-1] + piece.rstrip()) > letters:
                found.append("")
            found[-1] += piece
    return [line.strip() for line in found if line.strip()] or [text]


@specification
def curves(
    rows: Sequence[Row], *, x: str, y: str, domain: tuple[float, float] | None = None, broken: Sequence[Row] = ()
) -> Any:
    """Return learning curves: the mean over seeds with its band, for arm and baseline, and for train and test.

    A row has x, mean, low, high (None without a band), split ("train" or another name) and role ("arm" or "baseline").
    `broken` holds the points (x, value, run) of diverged runs, each drawn as a line that ends in a cross.
    """
    alt = import_module("altair")
    base = chart_of(alt, rows)
    scale = alt.Scale(domain=list(domain), zero=False, clamp=True) if domain else alt.Scale(zero=False)
    across = alt.X("x:Q", title=x, axis=alt.Axis(values=_ticks([row["x"] for row in rows]), grid=False))
    up = alt.Y("mean:Q", title=y, scale=scale, axis=alt.Axis(tickCount=5))
    colours = alt.Scale(domain=["baseline", "arm"], range=["var(--grey)", "var(--blue)"])
    seen = {"x": across, "y": up, "detail": "split:N", "color": alt.Color("role:N", legend=None, scale=colours)}
    dashes = alt.Scale(domain=[False, True], range=[[1, 0], [4, 3]])
    words = ["role:N", "split:N", alt.Tooltip("x:Q", title=x), *_numbers(alt, "mean", "low", "high")]
    layers = []
    if any(row["low"] is not None for row in rows):
        band = base.transform_filter("datum.low != null").mark_area(opacity=0.18)
        layers.append(band.encode(**seen, y2=alt.Y2("high:Q")).transform_calculate(mean="datum.low"))
    # Vega warns of an infinite extent for a layer without marks.
    if rows:
        # one epoch gives a point, not a line
        mean = base.mark_line(strokeWidth=1.8, point=len({row["x"] for row in rows}) == 1)
        dash = alt.StrokeDash("dashed:N", legend=None, scale=dashes)
        layers.append(mean.encode(**seen, strokeDash=dash, tooltip=words))
    if broken:
        points, red = chart_of(alt, broken), "var(--vermillion)"
        place = {"x": across, "y": alt.Y("value:Q", title=y, scale=scale)}
        ends = points.transform_filter("datum.last").mark_point(
            shape="cross", angle=45, size=60, filled=True, color=red
        )
        layers.append(points.mark_line(strokeWidth=1, color=red).encode(**place, detail="run:N"))
        layers.append(ends.encode(**place, tooltip=["run:N"]))
    return alt.layer(*layers, width="container", height=170)


def _ticks(epochs: list[int], most: int = 8) -> list[int]:
    last = max(epochs, default=1)
    return sorted({*range(0, last + 1, max(1, round(last / most)))} - {0} | {1})


def _numbers(alt: Any, *names: str) -> list[Any]:
    return [alt.Tooltip(f"{name}:Q", format=".4g") for name in names]


@specification
def lines(
    rows: Iterable[Row],
    *,
    x: str,
    y: str,
    series: str | None = None,
    log_x: bool = False,
    log_y: bool = False,
    points: bool = False,
) -> Any:
    """Return lines or points of `rows`, with colour and dash or shape by `series`, on linear or log axes."""
    alt = import_module("altair")
    flat = [
        {"x": row[x], "y": row[y], "series": str(row[series]) if series else "", "order": index}
        for index, row in enumerate(rows)
    ]
    flat = [row for row in flat if not (log_x and not _positive(row["x"])) and not (log_y and not _positive(row["y"]))]
    names = list(dict.fromkeys(row["series"] for row in flat))
    base = chart_of(alt, flat)
    kind = "Q" if all(isinstance(row["x"], (int, float)) for row in flat) else "O"
    legend = alt.Legend(title=series, orient="top", columns=2, labelLimit=170, symbolType="stroke")
    style = {"scale": alt.Scale(domain=names), "legend": legend if len(names) > 1 else None}
    encoding = {
        "x": alt.X(
            f"x:{kind}",
            title=x,
            axis=alt.Axis(tickCount=6, grid=False, labelAngle=0),
            **({"scale": _scale(alt, log_x)} if kind == "Q" else {}),
        ),
        "y": alt.Y(
            "y:Q", title=y, scale=_scale(alt, log_y), axis=alt.Axis(tickCount=5, format=".0e" if log_y else "~g")
        ),
        "color": alt.Color("series:N", **style),
        "tooltip": [
            alt.Tooltip(name, title=title)
            for name, title in (("series:N", series or "series"), (f"x:{kind}", x), ("y:Q", y))
        ],
    }
    if points:
        marks = base.mark_point(filled=True, size=46, opacity=0.85)
        chart = marks.encode(**encoding, shape=alt.Shape("series:N", **style))
    else:
        marks = base.mark_line(strokeWidth=1.8)
        chart = marks.encode(**encoding, strokeDash=alt.StrokeDash("series:N", **style), order=alt.Order("order:Q"))
    return chart.properties(width="container", height=260)


def _scale(alt: Any, log: bool) -> Any:
    return alt.Scale(type="log", nice=False) if log else alt.Scale(nice=False, zero=False)


def _positive(value: float | None) -> bool:
    return value is not None and value > 0


@specification
def dose(rows: Sequence[Row], *, x: str, y: str, seeds: Sequence[Row] = (), baseline: float | None = None) -> Any:
    """Return an outcome along an axis: means with intervals, a dot for each seed, the baseline as a dashed line.

    A row has x (any value, in the given order), mean, low and high (None without an interval); `seeds` has x, seed and
    value.
    """
    alt = import_module("altair")
    base = chart_of(alt, rows)
    across = alt.X("x:O", title=x, sort=[row["x"] for row in rows], axis=alt.Axis(labelAngle=0, grid=False))
    up = alt.Y("mean:Q", title=y, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5))
    seen = {"x": across, "y": up, "tooltip": [alt.Tooltip("x:N", title=x), *_numbers(alt, "mean", "low", "high")]}
    layers = []
    if baseline is not None:
        rule = chart_of(alt, [{"mean": baseline}]).mark_rule(color="var(--grey)", strokeDash=[4, 3])
        layers.append(rule.encode(y=up))
    if seeds:
        dots = chart_of(alt, seeds).mark_circle(size=22, opacity=0.4, color="var(--ink)", xOffset=9)
        words = ["seed:N", *_numbers(alt, "value")]
        layers.append(dots.encode(x=across, y=alt.Y("value:Q", title=y), tooltip=words))
    layers.append(base.mark_line(strokeWidth=1.6, color="var(--blue)").encode(x=across, y=up))
    if any(row["low"] is not None for row in rows):
        bars = base.transform_filter("datum.low != null").mark_rule(strokeWidth=2, color="var(--blue)")
        layers.append(bars.encode(**seen, y2=alt.Y2("high:Q")).transform_calculate(mean="datum.low"))
    points = base.mark_point(filled=True, size=70, opacity=1, color="var(--blue)")
    layers.append(points.encode(**seen))
    return alt.layer(*layers, width="container", height=220)


# pixels of a row
COST_ROW = 34


@specification
def against_cost(rows: Sequence[Row], *, x: str, outcome: str) -> Any:
    """Return the cost of each arm, one row an arm in the given order, with its outcome in a column on the right.

    A row has label, brief (a short name), text (its outcome), x and role ("arm" or "baseline", which is a grey square).
    A dashed line marks the baseline's cost.
    """
    alt = import_module("altair")
    base, order = chart_of(alt, rows), [row["label"] for row in rows]
    across = alt.X("x:Q", title=x, scale=alt.Scale(zero=False, nice=True, padding=14), axis=spread_axis(alt, 5))
    names, texts = ({row["label"]: row[key] for row in rows} for key in ("brief", "text"))
    down = functools.partial(alt.Y, "label:N", title=None, sort=order, scale=alt.Scale(type="band"))
    roles = ["arm", "baseline"]
    colour = alt.Color("role:N", legend=None, scale=alt.Scale(domain=roles, range=["var(--blue)", "var(--grey)"]))
    shape = alt.Shape("role:N", legend=None, scale=alt.Scale(domain=roles, range=["circle", "square"]))
    words = ["label:N", alt.Tooltip("x:Q", title=x, format=".4g"), alt.Tooltip("text:N", title=outcome)]
    layers = []
    if any(row["role"] == "baseline" for row in rows):
        plain = base.transform_filter("datum.role === 'baseline'").mark_rule(color="var(--grey)", strokeDash=[4, 3])
        layers.append(plain.encode(x=across))
    # a column of text is an axis, of which a layer has one
    right = down(axis=text_column(alt, texts, texts, small=True, orient="right"))
    layers.append(base.mark_point(opacity=0, size=0).encode(x=across, y=right))
    left = down(axis=label_column(alt, names, small=True))
    points = base.mark_point(filled=True, size=80, opacity=1)
    layers.append(points.encode(x=across, y=left, color=colour, shape=shape, tooltip=words))
    chart = alt.layer(*layers, width="container", height=COST_ROW * len(rows) + 6)
    return chart.resolve_axis(y="independent")


def spread_axis(alt: Any, ticks: int) -> Any:
    """Return an axis of about so many numbers, of which those are left out that would touch others or the ends."""
    return alt.Axis(tickCount=ticks, labelSeparation=6, labelFlush=False, labelBound=10, labelOverlap="greedy")
