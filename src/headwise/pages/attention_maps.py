"""Draw the attention maps of the heads of one layer side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwise.files.optional_imports import load
from headwise.pages.charts import specification

# pixels of a query
ROW = 11


@specification
def attention_maps(heads: Sequence[Sequence[Sequence[float]]], *, top: float) -> Any:
    """Return the maps of `heads`: lists of queries, each a list of weights by key; queries run down, keys to the right.

    Weights are coloured from 0 to `top`; an empty column sets the heads apart.
    """
    alt = load("altair", "study")
    queries, keys = len(heads[0]), len(heads[0][0])
    step = keys + 1
    rows = [
        {"head": head, "query": query, "weights": list(weights)}
        for head, maps in enumerate(heads)
        for query, weights in enumerate(maps)
    ]
    base = alt.Chart(alt.InlineData(values=rows)).transform_calculate(key=f"sequence({keys})")
    base = base.transform_flatten(["weights", "key"], ["weight", "key"])
    base = base.transform_calculate(place=f"datum.head * {step} + datum.key")
    middles = [head * step + keys // 2 for head in range(len(heads))]
    across = alt.X(
        "place",
        type="ordinal",
        title="key, by head",
        scale=alt.Scale(domain=list(range(len(heads) * step - 1)), paddingInner=0),
        axis=alt.Axis(
            values=middles,
            labelExpr=f"'head ' + floor(datum.value / {step})",
            labelAngle=0,
            labelOverlap=False,
            domain=False,
            ticks=False,
        ),
    )
    down = alt.Y(
        "query",
        type="ordinal",
        scale=alt.Scale(paddingInner=0),
        axis=alt.Axis(labelOverlap=True, domain=False, ticks=False),
    )
    legend = alt.Legend(title="weight", orient="top", gradientLength=110, gradientThickness=9)
    colour = alt.Color(
        "weight", type="quantitative", scale=alt.Scale(scheme="cividis", domain=[0.0, top]), legend=legend
    )
    words = [alt.Tooltip(name, type="nominal") for name in ("head", "query", "key")]
    words.append(alt.Tooltip("weight", type="quantitative", format=".3g"))
    chart = base.mark_rect(cursor="crosshair").encode(x=across, y=down, color=colour, tooltip=words)
    return chart.properties(width="container", height=max(ROW * queries, 60))
