"""The lines of health logs, reports and files: each is a figure or an alert."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NotRequired, cast

# From typing_extensions, which torch requires: pydantic supports typing's own only from Python 3.12 on.
from typing_extensions import TypedDict


class Record(TypedDict):
    """One figure of one head, of a group of heads or of a layer, at one step.

    `head` is None for a group or a layer. `low` and `high` bound the 95 % interval of a mean over sampled queries.
    """

    site: str
    depth: int
    head: int | None
    step: int
    statistic: str
    value: float
    group: NotRequired[int]
    sampled: NotRequired[bool]
    low: NotRequired[float]
    high: NotRequired[float]


class Alert(TypedDict):
    """A figure beyond its limit, with its meaning, the remedy, the source and the measured quality of the alarm."""

    alert: str
    site: str
    depth: int
    head: int | None
    step: int
    statistic: str
    value: float
    threshold: float
    sentence: str
    remedy: str
    source: str
    # how early and how often wrong the alarm is, in words
    measured: str
    # the last step at which the figure was read and healthy
    since: NotRequired[int]


Line = Record | Alert


def alerts_among(lines: Iterable[Line]) -> list[Alert]:
    """Return the alerts among the lines of a log."""
    return [cast(Alert, line) for line in lines if "alert" in line]


def figures_among(lines: Iterable[Line]) -> list[Record]:
    """Return the figures among the lines of a log."""
    # cast, because type checkers cannot narrow the union by a missing key.
    return [cast(Record, line) for line in lines if "alert" not in line]


def flat(lines: Iterable[Line]) -> dict[str, float]:
    """Return figures as one flat dict for metric loggers: health/<statistic>/<site>/<head> to value."""
    metrics = {}
    for record in figures_among(lines):
        place = "" if record["head"] is None else f"/head{record['head']}"
        place = f"/group{record['group']}" if "group" in record else place
        metrics[f"health/{record['statistic']}/{record['site']}{place}"] = record["value"]
    return metrics
