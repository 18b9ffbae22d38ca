"""Build the charts of the reports: heat maps, forest plots, learning curves and plain lines.

All charts take the width of their box, colour-blind safe colours (Okabe and Ito 2008; heat maps use cividis) and, for what
matters, a second mark beside colour (shape, dash or text).
"""

from __future__ import annotations

import functools
import re

from headwise.report.optional import load

ROW = 22  # pixels of a heat map's row
NARROW_LABELS = 110  # pixels that an axis label may take, so that a chart stays legible at 400 px


def _specification(build):
    """Make a function that builds an Altair chart return its Vega-Lite dictionary, six times faster: without Altair's validation.

    The tests validate a chart of each kind.
    """

    @functools.wraps(build)
    def specify(*arguments, **settings) -> dict:
        with load("altair.utils.schemapi", "study").debug_mode(False):
            return build(*arguments, **settings).to_dict(validate=False)

    return specify


@_specification
def heat_map(
    rows,
    *,
    x: str = "head",
    y: str = "layer",
    value: str = "value",
    value_title: str = "value",
    legend_title: str | None = None,
    domain: tuple[float, float] | None = None,
    tooltip=(),
    reading: str | None = None,
):
    """Return a heat map (a Vega-Lite dictionary, as all charts here) of `rows` (dictionaries), by default layer × head; cells without a row stay empty.

    `tooltip` names further fields to show on hover; a list under "spectrum" is drawn below the chart for the cell pointed at when
    the figure is given `trace`. `reading` names a numeric field (the step): a slider then chooses which reading is shown.
    `value_title` names the value on hover and above the colours, there replaced by `legend_title` when it is given. `domain` fixes the colour scale; by default it spans all readings.
    """
    alt = load("altair", "study")
    rows, steps = _with_positions(rows, reading)
    numbers = [row[value] for row in rows if row.get(value) is not None]
    domain = domain or ((min(numbers), max(numbers)) if numbers else (0.0, 1.0))
    shown = [x, y, *tooltip] + ([reading] if reading else [])
    base = alt.Chart(alt.InlineData(values=rows))
    if reading:
        slider = alt.binding_range(min=0, max=max(len(steps) - 1, 0), step=1, name=f"{reading} ")
        position = alt.param(name="position", value=max(len(steps) - 1, 0), bind=slider)
        base = base.add_params(position).transform_filter("datum.position == position")
    chart = base.mark_rect(cursor="crosshair").encode(
        x=alt.X(
            x,
            type="ordinal",
            title=x,
            sort=_in_order(rows, x),
            axis=alt.Axis(labelAngle=0, labelOverlap=True, domain=False, ticks=False),
        ),
        y=alt.Y(
            y,
            type="ordinal",
            title=y,
            sort=_in_order(rows, y),
            axis=alt.Axis(labelLimit=NARROW_LABELS, domain=False, ticks=False),
        ),
        color=alt.Color(
            value,
            type="quantitative",
            scale=alt.Scale(scheme="cividis", domain=list(domain)),
            legend=alt.Legend(
                title=value_title if legend_title is None else legend_title or None,
                orient="top",
                gradientLength=160,
                gradientThickness=9,
                titleLimit=300,
            ),
        ),
        tooltip=[alt.Tooltip(name, title=name, type="nominal") for name in shown]
        + [alt.Tooltip(value, title=value_title, type="quantitative", format=".4g")],
    )
    height = max(ROW * len({row[y] for row in rows}), 60)
    chart = chart.properties(width="container", height=height)
    if reading:
        chart = chart.properties(
            title=alt.Title(text=alt.expr(f"'{reading} ' + {steps}[position]"), anchor="start", fontSize=12)
        )
    return chart


def _in_order(rows, name: str) -> list:
    """Return the values of a field so that "10 · 2" follows "9 · 11"."""

    def parts(value):
        return [
            (0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", str(value)) if part
        ]

    return sorted({row[name] for row in rows}, key=parts)


def _with_positions(rows, reading):
    rows = [dict(row) for row in rows]
    steps = sorted({row[reading] for row in rows}) if reading else []
    for row in rows:
        if reading:
            row["position"] = steps.index(row[reading])
    return rows, steps


@_specification
def forest(rows, *, title: str):
    """Return the paired differences as a forest plot.

    A row has label, mean, low, high (None where there is no interval), verdict and words (its tooltip). The label stands above its
    interval, so that the plot keeps its width on a small screen.
    """
    alt = load("altair", "study")
    order = [row["label"] for row in rows]
    base = alt.Chart(alt.InlineData(values=list(rows)))
    y = alt.Y("label", type="nominal", sort=order, axis=None, scale=alt.Scale(paddingInner=0.2))
    colour = alt.Color("verdict", type="nominal", legend=None, scale=_verdict_scale(alt, "var(--grey)"))
    x = alt.X(
        "mean", type="quantitative", title=title, scale=alt.Scale(zero=True, nice=True), axis=alt.Axis(tickCount=6)
    )
    words = [alt.Tooltip(name, type="nominal") for name in ("label", "verdict", "words")]
    zero = alt.Chart(alt.InlineData(values=[{"zero": 0}])).mark_rule(color="var(--ink)", strokeWidth=1)
    intervals = base.transform_filter("datum.low != null").mark_rule(strokeWidth=2.5)
    shapes = alt.Scale(
        domain=["better", "worse", "no evidence", "undecided"],
        range=["triangle-right", "triangle-left", "circle", "diamond"],
    )
    layers = [
        zero.encode(x=alt.X("zero", type="quantitative", title=title)),
        intervals.encode(x=x, x2="high:Q", y=y, color=colour, tooltip=words).transform_calculate(mean="datum.low"),
        base.mark_point(filled=True, size=150, opacity=1).encode(
            x=x, y=y, color=colour, shape=alt.Shape("verdict", type="nominal", legend=None, scale=shapes), tooltip=words
        ),
        base.mark_text(align="left", dy=-14, fontSize=11.5, limit=330, color="var(--ink)").encode(
            y=y, x=alt.value(2), text="label:N"
        ),
    ]
    return alt.layer(*layers).properties(width="container", height=44 * len(order) + 8)


def _verdict_scale(alt, otherwise: str):
    return alt.Scale(
        domain=["better", "worse", "no evidence", "undecided"],
        range=["var(--blue)", "var(--vermillion)", otherwise, otherwise],
    )


@_specification
def curves(rows, *, x: str, y: str, domain=None, broken=()):
    """Return learning curves: the mean of each series over seeds with its band, method against baseline, train against test.

    A row has x, mean, low, high (None without a band), split ("train" or another name) and role ("method" or "baseline").
    `broken` holds the points (x, value, run) of diverged runs, drawn singly and ending in a cross.
    """
    alt = load("altair", "study")
    base = alt.Chart(alt.InlineData(values=list(rows)))
    scale = alt.Scale(domain=list(domain), zero=False, clamp=True) if domain else alt.Scale(zero=False)
    across = alt.X("x", type="quantitative", title=x, axis=alt.Axis(tickMinStep=1, tickCount=6, grid=False))
    up = alt.Y("mean", type="quantitative", title=y, scale=scale, axis=alt.Axis(tickCount=5))
    colour = alt.Color(
        "role",
        type="nominal",
        legend=None,
        scale=alt.Scale(domain=["baseline", "method"], range=["var(--grey)", "var(--blue)"]),
    )
    dash = alt.StrokeDash(
        "dashed", type="nominal", legend=None, scale=alt.Scale(domain=[False, True], range=[[1, 0], [4, 3]])
    )
    number = [alt.Tooltip(name, type="quantitative", format=".4g") for name in ("mean", "low", "high")]
    words = [
        alt.Tooltip("role", type="nominal"),
        alt.Tooltip("split", type="nominal"),
        alt.Tooltip("x", type="quantitative", title=x),
    ]
    band = base.transform_filter("datum.low != null").mark_area(opacity=0.18)
    layers = [
        band.encode(x=across, y=up, y2="high:Q", color=colour, detail="split:N").transform_calculate(mean="datum.low"),
        base.mark_line(strokeWidth=1.8).encode(
            x=across, y=up, color=colour, strokeDash=dash, detail="split:N", tooltip=[*words, *number]
        ),
    ]
    if broken:
        layers += _broken(alt, broken, across, scale, y)
    return alt.layer(*layers).properties(width="container", height=170)


def _broken(alt, broken, across, scale, y):
    points = alt.Chart(alt.InlineData(values=list(broken)))
    up = alt.Y("value", type="quantitative", title=y, scale=scale)
    ends = points.transform_filter("datum.last").mark_point(
        shape="cross", angle=45, size=60, filled=True, color="var(--vermillion)"
    )
    return [
        points.mark_line(strokeWidth=1, color="var(--vermillion)").encode(x=across, y=up, detail="run:N"),
        ends.encode(x=across, y=up, tooltip=[alt.Tooltip("run", type="nominal")]),
    ]


@_specification
def lines(
    rows, *, x: str, y: str, series: str | None = None, log_x: bool = False, log_y: bool = False, points: bool = False
):
    """Return lines (or points) of `rows`, one colour and one dash (or shape) per value of `series`, over a linear or log axis."""
    alt = load("altair", "study")
    flat = [
        {"x": row[x], "y": row[y], "series": str(row[series]) if series else "", "order": at}
        for at, row in enumerate(rows)
    ]
    flat = [row for row in flat if not (log_x and not _positive(row["x"])) and not (log_y and not _positive(row["y"]))]
    names = list(dict.fromkeys(row["series"] for row in flat))
    base = alt.Chart(alt.InlineData(values=flat))
    across_type = "quantitative" if all(isinstance(row["x"], (int, float)) for row in flat) else "ordinal"
    across_scale = {"scale": _scale(alt, log_x)} if across_type == "quantitative" else {}
    legend = (
        alt.Legend(title=series, orient="top", columns=2, labelLimit=170, symbolType="stroke")
        if len(names) > 1
        else None
    )
    encoding = {
        "x": alt.X(
            "x", type=across_type, title=x, axis=alt.Axis(tickCount=6, grid=False, labelAngle=0), **across_scale
        ),
        "y": alt.Y(
            "y",
            type="quantitative",
            title=y,
            scale=_scale(alt, log_y),
            axis=_axis(alt, log_y),
        ),
        "color": alt.Color("series", type="nominal", scale=alt.Scale(domain=names), legend=legend),
        "tooltip": [
            alt.Tooltip(n, title=t, type=k)
            for n, t, k in (("series", series or "series", "nominal"), ("x", x, across_type), ("y", y, "quantitative"))
        ],
    }
    dash = alt.StrokeDash("series", type="nominal", scale=alt.Scale(domain=names), legend=legend)
    if points:
        shape = alt.Shape("series", type="nominal", scale=alt.Scale(domain=names), legend=legend)
        chart = base.mark_point(filled=True, size=46, opacity=0.85).encode(**encoding, shape=shape)
    else:
        chart = base.mark_line(strokeWidth=1.8).encode(
            **encoding, strokeDash=dash, order=alt.Order("order", type="quantitative")
        )
    return chart.properties(width="container", height=260)


def _scale(alt, log: bool):
    return alt.Scale(type="log", nice=False) if log else alt.Scale(nice=False, zero=False)


def _axis(alt, log: bool):
    return alt.Axis(tickCount=5, format="~g" if not log else ".0e")


def _positive(value) -> bool:
    return value is not None and value > 0
