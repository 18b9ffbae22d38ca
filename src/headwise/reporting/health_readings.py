"""Gather the health records of a study's watched runs: alerts, one run an arm in full, and means over seeds of all."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from headwise.files.health_records import Alert, Record, alerts_among, figures_among
from headwise.results.folder import RunFolder, StudyFolder

READINGS = 16  # drawn per run, evenly spaced, first and last included: more would not be told apart on a screen
# Drawn where more was read: what the alerts judge, and the plainest figures of entropy, logits and sinks. All of it
# would be megabytes.
DRAWN = (
    "attention_entropy entropy_share max_logit sink_mass token_cosine high_frequency effective_rank_qk "
    "effective_rank_vo output_norm head_redundancy"
).split()

Records = list[Record]
Figures = dict[tuple[str, str, Any], list[float]]
Means = dict[tuple[str, str, Any], float]


class Readings:
    """Holds the watched runs of a study: `alerts`, the first watched run of each arm, and means over heads and seeds.

    `by_layer` is the mean of the last reading per (arm, statistic, layer), `by_step` that of every step per (arm,
    statistic, step); `seeds` counts the watched runs of each arm.
    """

    def __init__(self, study: StudyFolder) -> None:
        self.alerts: list[tuple[RunFolder, Alert]] = []
        self.first: dict[str, tuple[RunFolder, Records]] = {}
        self.seeds: dict[str, int] = defaultdict(int)
        layers: Figures = defaultdict(list)
        steps: Figures = defaultdict(list)
        for label in study.arms:
            for run in study.of(label):
                records = run.health()
                if not records:
                    continue
                self.seeds[label] += 1
                self.alerts += [(run, alert) for alert in alerts_among(records)]
                readings = [record for record in figures_among(records) if finite(record["value"])]
                self.first.setdefault(label, (run, readings))
                _add(label, readings, layers, steps)
        self.by_layer, self.by_step = _means(layers), _means(steps)

    @property
    def watched(self) -> int:
        """Return the number of runs that were watched."""
        return sum(self.seeds.values())

    def statistics(self) -> list[str]:
        """Return the names of what is drawn, in the order of the first run that has them."""
        found = list(dict.fromkeys(record["statistic"] for _, records in self.first.values() for record in records))
        if len(found) > len(DRAWN):
            return [name for name in found if name in DRAWN] or found
        return found

    def domain(self, statistic: str) -> tuple[float, float]:
        """Return the range of a statistic over the drawn runs of all arms: one colour scale for all."""
        return span([r["value"] for _, records in self.first.values() for r in records if r["statistic"] == statistic])


def _add(label: str, readings: Records, layers: Figures, steps: Figures) -> None:
    by_statistic: dict[str, Records] = defaultdict(list)
    for record in readings:
        by_statistic[record["statistic"]].append(record)
    for name, records in by_statistic.items():
        last, named = max(record["step"] for record in records), layer_names(records)
        for record in records:
            steps[label, name, record["step"]].append(record["value"])
            if record["step"] == last:
                layers[label, name, named(record)].append(record["value"])


def _means(found: Figures) -> Means:
    return {key: math.fsum(values) / len(values) for key, values in found.items()}


def layer_names(records: Records) -> Callable[[Record], Any]:
    """Return how a record's layer is named: by depth, or by its site where several sites share a depth (encoder and
    decoder)."""
    at_depth: dict[Any, set[Any]] = {}
    for record in records:
        at_depth.setdefault(record.get("depth"), set()).add(record.get("site"))
    if None in at_depth or any(len(sites) > 1 for sites in at_depth.values()):
        return lambda record: str(record.get("site"))
    return lambda record: record["depth"]


def thin(steps: list[int], most: int = READINGS) -> list[int]:
    """Return at most `most` of the steps, evenly spaced, the first and the last included."""
    if len(steps) <= most:
        return steps
    return [steps[round(at * (len(steps) - 1) / (most - 1))] for at in range(most)]


def with_unit(name: str) -> str:
    """Return a statistic's name in words, with its unit where it is one of headwise's own."""
    from headwise.statistics import STATISTICS

    words = name.replace("_", " ")
    return f"{words} ({STATISTICS[name].unit})" if name in STATISTICS else words


def span(values: list[float]) -> tuple[float, float]:
    """Return the range of the values, never empty."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def finite(value: Any) -> bool:
    """Return whether a value is a number that can be drawn."""
    return isinstance(value, int | float) and math.isfinite(value)
