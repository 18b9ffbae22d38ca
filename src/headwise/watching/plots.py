"""Plots of what was watched: a small chart for each statistic, a line for each head or layer, alerts marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from headwise.core.settings import suggest
from headwise.files.health_records import Alert, Record
from headwise.files.optional_imports import load
from headwise.watching.log_figures import BRIEF

WIDTH, HEIGHT = 320, 160
# the colours of a heat map, from the first layer to the last
SCHEME = "viridis"


def plot(records: Sequence[Record], alerts: Sequence[Alert], names: Sequence[str]) -> Any:
    """Return a chart of altair, which a notebook shows and `.save("health.html")` writes.

    Args:
        records: everything that was read.
        alerts: marked at their steps in the chart of their statistic, those of the loss in every chart.
        names: of statistics; none for the six that loggers show.

    Raises:
        ValueError: where nothing was read of a name.
        ImportError: where altair is missing, naming the extra.
    """
    alt = load("altair", "study")
    read = list(dict.fromkeys(record["statistic"] for record in records))
    for name in names:
        if name not in read:
            known = ", ".join(read) or "nothing yet: call step() after optimizer.step()"
            raise ValueError(f"nothing was read of {name!r}.{suggest(name, read)} Read so far: {known}.")
    chosen = list(names) or [name for name in BRIEF if name in read] or read[:6]
    if not chosen:
        raise ValueError("nothing was read yet: call step() after optimizer.step()")
    # an alert of what is not among the records, such as the loss, is marked everywhere
    marked = {
        name: [one for one in alerts if one["statistic"] == name or one["statistic"] not in read] for name in chosen
    }
    panels = [_panel(alt, name, records, marked[name]) for name in chosen]
    return alt.concat(*panels, columns=2).resolve_scale(color="shared")


def _panel(alt: Any, name: str, records: Sequence[Record], alerts: Sequence[Alert]) -> Any:
    rows = [
        {
            "step": record["step"],
            "value": record["value"],
            "layer": record["depth"],
            "place": record["site"] + ("" if record["head"] is None else f" head {record['head']}"),
        }
        for record in records
        if record["statistic"] == name and math.isfinite(record["value"])
    ]
    title = name.replace("_", " ")
    base = alt.Chart(alt.InlineData(values=rows), title=title, width=WIDTH, height=HEIGHT)
    lines = base.mark_line(strokeWidth=1, point=len({row["step"] for row in rows}) == 1).encode(
        x=alt.X("step", type="quantitative", title="optimizer step"),
        y=alt.Y("value", type="quantitative", title=title, scale=alt.Scale(zero=False)),
        color=alt.Color("layer", type="quantitative", title="layer", scale=alt.Scale(scheme=SCHEME)),
        detail="place:N",
        tooltip=[alt.Tooltip(one) for one in ("place:N", "step:Q", "value:Q")],
    )
    if not alerts:
        return lines
    marks = [{"step": alert["step"], "alert": alert["sentence"]} for alert in alerts]
    rules = alt.Chart(alt.InlineData(values=marks)).mark_rule(color="#d55e00", strokeDash=[4, 3])
    return lines + rules.encode(x=alt.X("step", type="quantitative"), tooltip=[alt.Tooltip("alert:N")])
