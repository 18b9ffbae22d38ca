"""The charts that only a league has: gain against cost, and the forest plot of a world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwise.files.optional_imports import load
from headwise_verdict.pages.charts import Row, chart_of, specification

KINDS = ("control", "method", "pair")
AGAINST = ("the plain model", "the best control")


@specification
def pareto(rows: Sequence[Row]) -> Any:
    """Return the chart of gain against the cost of a step, with a point and an interval for each of `rows`.

    A row has name, words, kind, cost, gain, low, high and best; the names of the best are written beside their points.
    """
    alt = load("altair", "study")
    base = chart_of(alt, rows)
    across = alt.X(
        "cost", type="quantitative", title="time of a step, of the plain model's", scale=alt.Scale(zero=False)
    )
    up = alt.Y("gain", type="quantitative", title="gain (spreads of the plain model)", scale=alt.Scale(zero=True))
    colour = alt.Color(
        "kind",
        type="nominal",
        scale=alt.Scale(domain=list(KINDS), range=["var(--vermillion)", "var(--blue)", "var(--purple)"]),
        legend=alt.Legend(title=None, orient="top"),
    )
    shape = alt.Shape("kind", type="nominal", scale=alt.Scale(domain=list(KINDS)), legend=None)
    words = [alt.Tooltip(name, type="nominal") for name in ("name", "words")]
    intervals = base.mark_rule(opacity=0.35).encode(
        x=across, y=alt.Y("low", type="quantitative"), y2=alt.Y2("high"), color=colour
    )
    points = base.mark_point(filled=True, size=60).encode(x=across, y=up, color=colour, shape=shape, tooltip=words)
    names = (
        chart_of(alt, [row for row in rows if row["best"]])
        .mark_text(align="left", dx=7, fontSize=11, color="var(--ink)")
        .encode(x=across, y=up, text=alt.Text("name", type="nominal"))
    )
    return alt.layer(intervals, points, names, width="container", height=340)


@specification
def forest(rows: Sequence[Row], *, title: str, order: Sequence[str]) -> Any:
    """Return the forest plot of one world: per entry its difference from the plain model and from the best control.

    A row has entry, against, mean, low, high, verdict and words.
    """
    alt = load("altair", "study")
    base = chart_of(alt, rows)
    up = alt.Y(
        "entry",
        type="nominal",
        sort=list(order),
        title=None,
        axis=alt.Axis(labelLimit=190),
        scale=alt.Scale(padding=0.2),
    )
    beside = alt.YOffset("against", type="nominal", sort=list(AGAINST))
    colour = alt.Color(
        "against",
        type="nominal",
        scale=alt.Scale(domain=list(AGAINST), range=["var(--blue)", "var(--vermillion)"]),
        legend=alt.Legend(title="against", orient="top"),
    )
    words = [alt.Tooltip(name, type="nominal") for name in ("entry", "against", "words", "verdict")]
    across = alt.X("mean", type="quantitative", title=title)
    intervals = base.mark_rule(strokeWidth=1.5).encode(
        x=alt.X("low", type="quantitative", title=title), x2=alt.X2("high"), y=up, yOffset=beside, color=colour
    )
    points = base.mark_point(filled=True, size=28).encode(x=across, y=up, yOffset=beside, color=colour, tooltip=words)
    zero = chart_of(alt, [{"zero": 0}]).mark_rule(color="var(--ink)", opacity=0.5)
    zero = zero.encode(x=alt.X("zero", type="quantitative", title=title))
    return alt.layer(zero, intervals, points, width="container", height=alt.Step(9))


def undominated(points: dict[str, tuple[float, float]]) -> set[str]:
    """Return the names on the Pareto front: no other point has at most the cost and at least the gain, and differs."""

    def beaten(name: str) -> bool:
        cost, gain = points[name]
        return any(c <= cost and g >= gain and (c, g) != (cost, gain) for c, g in points.values())

    return {name for name in points if not beaten(name)}
