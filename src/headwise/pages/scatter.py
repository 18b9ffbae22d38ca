"""Build the chart of pairs: one figure against another that it is said to equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwise.files.optional_imports import load
from headwise.pages.charts import Row, specification


@specification
def pairs_of(rows: Sequence[Row], *, x: str, y: str, series: str | None = None) -> Any:
    """Return points of `rows` (numbers in the fields x and y), one colour and shape per value of `series`, and the line
    of equality."""
    alt = load("altair", "study")
    flat = [{"x": row[x], "y": row[y], "series": str(row[series]) if series else ""} for row in rows]
    most = max((max(row["x"], row["y"]) for row in flat), default=1.0) or 1.0
    names = list(dict.fromkeys(row["series"] for row in flat))
    scale = alt.Scale(domain=[0, 1.03 * most], nice=False)
    legend = alt.Legend(title=series, orient="top", columns=2, labelLimit=170) if len(names) > 1 else None
    across = alt.X("x", type="quantitative", title=x, scale=scale, axis=alt.Axis(tickCount=5, grid=False))
    up = alt.Y("y", type="quantitative", title=y, scale=scale, axis=alt.Axis(tickCount=5))
    line = alt.Chart(alt.InlineData(values=[{"x": 0, "y": 0}, {"x": most, "y": most}]))
    points = alt.Chart(alt.InlineData(values=flat)).mark_point(filled=True, size=22, opacity=0.6)
    shown = [alt.Tooltip("series", type="nominal")] if series else []
    shown += [alt.Tooltip(n, type="quantitative", title=t, format=".4g") for n, t in (("x", x), ("y", y))]
    return alt.layer(
        line.mark_line(strokeWidth=1, color="var(--grey)", strokeDash=[4, 3]).encode(x=across, y=up),
        points.encode(
            x=across,
            y=up,
            color=alt.Color("series", type="nominal", scale=alt.Scale(domain=names), legend=legend),
            shape=alt.Shape("series", type="nominal", scale=alt.Scale(domain=names), legend=legend),
            tooltip=shown,
        ),
    ).properties(width="container", height=300)
