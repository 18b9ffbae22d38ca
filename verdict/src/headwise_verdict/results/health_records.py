"""The lines of health logs, reports and files: each is a figure or an alert."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NotRequired, cast

# From typing_extensions, which torch requires: pydantic supports typing's own only from Python 3.12 on.
from typing_extensions import TypedDict

from headwise_verdict.files.durable import numbered_lines
from headwise_verdict.files.foreign_text import printable


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


def read_health(path: Path) -> list[Line]:
    """Return the lines of a file of JSON lines, or an empty list without such a file.

    Raises:
        ValueError: if a whole line is neither a record nor an alert; the message has file, line and field.
    """
    return [_checked(record, path, number) for number, record in numbered_lines(path)]


def _checked(value: dict[str, Any], path: Path, number: int) -> Line:
    pydantic = import_module("pydantic")
    is_alert = "alert" in value
    try:
        return _reader(is_alert).validate_python(_restore_non_finite(printable(value)))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the line"
        kind = "alert" if is_alert else "record"
        raise ValueError(f"{path}, line {number}, is not a health {kind}: {field}: {first['msg']}") from None


@cache
def _reader(is_alert: bool) -> Any:
    # Cached: a file can have hundreds of thousands of lines.
    return import_module("pydantic").TypeAdapter(Alert if is_alert else Record)


def _restore_non_finite(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line with the NaN or infinity that was written as null, because JSON cannot hold it."""
    lost = {"value": math.nan, "low": math.nan, "high": math.nan, "threshold": math.inf}
    return {key: lost[key] if value is None and key in lost else value for key, value in line.items()}
