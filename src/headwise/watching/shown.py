"""What loggers of metrics are given of a reading: a figure for each layer, a heat map of the heads, and the alerts as sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from headwise.files.health_records import Line, Record, alerts_among, figures_among, flat
from headwise.watching.alerts import told
from headwise.watching.heat_maps import heat_map


@dataclass(frozen=True)
class Shown:
    """Hold figures and pictures by name, and one text for each kind of alert."""

    figures: dict[str, float]
    maps: dict[str, Tensor]
    alerts: dict[str, str]


def shown(lines: Iterable[Line], heads: bool = False) -> Shown:
    """Give what is shown of the lines of one step.

    `health/<statistic>/<site>` is the layer's figure, or the mean over its heads. For figures of heads `health/<statistic>/lowest` and
    `/highest` stand beside the heat map `health/map/<statistic>`, whose ends they are. With `heads`, every head is a figure
    `health/<statistic>/<site>/head<n>` too.
    """
    given = list(lines)
    by_layer: dict[str, list[float]] = {}
    by_statistic: dict[str, list[Record]] = {}
    for record in figures_among(given):
        by_layer.setdefault(f"health/{record['statistic']}/{record['site']}", []).append(record["value"])
        if record["head"] is not None:
            by_statistic.setdefault(record["statistic"], []).append(record)
    figures = {name: sum(values) / len(values) for name, values in by_layer.items()}
    for name, records in by_statistic.items():
        values = [value for record in records if math.isfinite(value := record["value"])] or [math.nan]
        figures |= {f"health/{name}/lowest": min(values), f"health/{name}/highest": max(values)}
    alerts = alerts_among(given)
    kinds = dict.fromkeys(alert["alert"] for alert in alerts)
    if alerts:
        figures["health/alerts"] = float(len(alerts))
    return Shown(
        figures | (flat(given) if heads else {}),
        {f"health/map/{name}": heat_map(records) for name, records in by_statistic.items()},
        dict(zip(kinds, told(alerts))),
    )
