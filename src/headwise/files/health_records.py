"""Records: the lines of health, one figure or one alert each, as users, logs and reports see them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NotRequired, cast

# Of typing_extensions, which torch brings: pydantic reads typing's own from Python 3.12 on.
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
    """A figure that passed its limit, what that means, what helps, who showed it, and how good this alarm was found to
    be."""

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
    # absent in files of earlier versions
    measured: NotRequired[str]


Line = Record | Alert


def alerts_among(lines: Iterable[Line]) -> list[Alert]:
    """Return the alerts among what a log takes."""
    return [cast(Alert, line) for line in lines if "alert" in line]


def figures_among(lines: Iterable[Line]) -> list[Record]:
    """Return the figures among what a log takes."""
    # A checker does not tell the two by a field that one of them has not.
    return [cast(Record, line) for line in lines if "alert" not in line]


def flat(lines: Iterable[Line]) -> dict[str, float]:
    """Return figures as one flat dict for loggers of metrics: health/<statistic>/<site>/<head> to value."""
    named = {}
    for record in figures_among(lines):
        place = "" if record["head"] is None else f"/head{record['head']}"
        place = f"/group{record['group']}" if "group" in record else place
        named[f"health/{record['statistic']}/{record['site']}{place}"] = record["value"]
    return named
