"""Charts of lines: learning curves with their bands, plain lines or points, and outcomes along an axis or a cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from headwise_verdict.pages.charts import Row, chart_of, specification
from headwise_verdict.pages.label_columns import label_column, text_column


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
    across = alt.X(
        "x", type="quantitative", title=x, axis=alt.Axis(values=_ticks([row["x"] for row in rows]), grid=False)
    )
    up = alt.Y("mean", type="quantitative", title=y, scale=scale, axis=alt.Axis(tickCount=5))
    colour = alt.Color(
        "role",
        type="nominal",
        legend=None,
        scale=alt.Scale(domain=["baseline", "arm"], range=["var(--grey)", "var(--blue)"]),
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
    single = len({row["x"] for row in rows}) == 1  # one epoch gives a point, not a line
    # Vega warns of an infinite extent for a layer without marks.
    layers = []
    if rows:
        mean = base.mark_line(strokeWidth=1.8, point=single)
        layers.append(
            mean.encode(
                x=across, y=up, color=colour, strokeDash=dash, detail=alt.Detail("split:N"), tooltip=[*words, *number]
            )
        )
    if any(row["low"] is not None for row in rows):
        band = band.encode(x=across, y=up, y2=alt.Y2("high:Q"), color=colour, detail=alt.Detail("split:N"))
        layers.insert(0, band.transform_calculate(mean="datum.low"))
    if broken:
        layers += _broken(alt, broken, across, scale, y)
    return alt.layer(*layers, width="container", height=170)


def _ticks(epochs: list[int], most: int = 8) -> list[int]:
    last = max(epochs, default=1)
    return sorted({*range(0, last + 1, max(1, round(last / most)))} - {0} | {1})


def _broken(alt: Any, broken: Sequence[Row], across: Any, scale: Any, y: str) -> list[Any]:
    points = chart_of(alt, broken)
    up = alt.Y("value", type="quantitative", title=y, scale=scale)
    ends = points.transform_filter("datum.last").mark_point(
        shape="cross", angle=45, size=60, filled=True, color="var(--vermillion)"
    )
    return [
        points.mark_line(strokeWidth=1, color="var(--vermillion)").encode(x=across, y=up, detail=alt.Detail("run:N")),
        ends.encode(x=across, y=up, tooltip=[alt.Tooltip("run", type="nominal")]),
    ]


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
        "y": alt.Y("y", type="quantitative", title=y, scale=_scale(alt, log_y), axis=_axis(alt, log_y)),
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


def _scale(alt: Any, log: bool) -> Any:
    return alt.Scale(type="log", nice=False) if log else alt.Scale(nice=False, zero=False)


def _axis(alt: Any, log: bool) -> Any:
    return alt.Axis(tickCount=5, format="~g" if not log else ".0e")


def _positive(value: float | None) -> bool:
    return value is not None and value > 0


@specification
def dose(rows: Sequence[Row], *, x: str, y: str, seeds: Sequence[Row] = (), baseline: float | None = None) -> Any:
    """Return an outcome along an axis: means with intervals, a dot for each seed, the baseline as a dashed line.

    A row has x (any value, in the given order), mean, low and high (None without an interval); `seeds` has x, seed and
    value.
    """
    alt = import_module("altair")
    order = [row["x"] for row in rows]
    base = chart_of(alt, rows)
    across = alt.X("x", type="ordinal", title=x, sort=order, axis=alt.Axis(labelAngle=0, grid=False))
    up = alt.Y("mean", type="quantitative", title=y, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5))
    words = [alt.Tooltip("x", type="nominal", title=x)]
    words += [alt.Tooltip(name, type="quantitative", format=".4g") for name in ("mean", "low", "high")]
    layers = []
    if baseline is not None:
        rule = chart_of(alt, [{"mean": baseline}]).mark_rule(color="var(--grey)", strokeDash=[4, 3])
        layers.append(rule.encode(y=up))
    if seeds:
        dots = chart_of(alt, seeds).mark_circle(size=22, opacity=0.4, color="var(--ink)", xOffset=9)
        tooltips = [alt.Tooltip("seed", type="nominal"), alt.Tooltip("value", type="quantitative", format=".4g")]
        layers.append(dots.encode(x=across, y=alt.Y("value", type="quantitative", title=y), tooltip=tooltips))
    layers.append(base.mark_line(strokeWidth=1.6, color="var(--blue)").encode(x=across, y=up))
    if any(row["low"] is not None for row in rows):
        bars = base.transform_filter("datum.low != null").mark_rule(strokeWidth=2, color="var(--blue)")
        layers.append(
            bars.encode(x=across, y=up, y2=alt.Y2("high:Q"), tooltip=words).transform_calculate(mean="datum.low")
        )
    points = base.mark_point(filled=True, size=70, opacity=1, color="var(--blue)")
    layers.append(points.encode(x=across, y=up, tooltip=words))
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
    scale = alt.Scale(zero=False, nice=True, padding=14)
    across = alt.X(
        "x",
        type="quantitative",
        title=x,
        scale=scale,
        axis=alt.Axis(tickCount=5, labelSeparation=6, labelFlush=False, labelBound=10, labelOverlap="greedy"),
    )
    names, texts = ({row["label"]: row[key] for row in rows} for key in ("brief", "text"))
    columns = (
        label_column(alt, names, small=True),
        text_column(alt, texts, texts, small=True, orient="right"),
    )
    roles, colours = ["arm", "baseline"], ["var(--blue)", "var(--grey)"]
    colour = alt.Color("role", type="nominal", legend=None, scale=alt.Scale(domain=roles, range=colours))
    shape = alt.Shape("role", type="nominal", legend=None, scale=alt.Scale(domain=roles, range=["circle", "square"]))
    words = [alt.Tooltip("label", type="nominal"), alt.Tooltip("x", type="quantitative", title=x, format=".4g")]
    words.append(alt.Tooltip("text", type="nominal", title=outcome))
    plain = base.transform_filter("datum.role === 'baseline'").mark_rule(color="var(--grey)", strokeDash=[4, 3])
    layers = [plain.encode(x=across)] if any(row["role"] == "baseline" for row in rows) else []
    # a column of text is an axis, of which a layer has one
    for mark, column in (
        (base.mark_point(opacity=0, size=0), columns[1]),
        (base.mark_point(filled=True, size=80, opacity=1), columns[0]),
    ):
        down = alt.Y("label", type="nominal", title=None, sort=order, scale=alt.Scale(type="band"), axis=column)
        seen = {} if column is columns[1] else {"color": colour, "shape": shape, "tooltip": words}
        layers.append(mark.encode(x=across, y=down, **seen))
    chart = alt.layer(*layers, width="container", height=COST_ROW * len(rows) + 6)
    return chart.resolve_axis(y="independent")
