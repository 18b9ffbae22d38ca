"""Records: what an audit reads of heads and layers, and what it says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired

# Of typing_extensions, which torch brings: pydantic reads typing's own from Python 3.12 on.
from typing_extensions import TypedDict

from headwise.files.health_records import Alert
from headwise.files.health_records import Record as DataRecord


class WeightRecord(TypedDict):
    """One figure of the weights of one head, or of a group of heads; `head` is None for a group or a layer."""

    site: str
    depth: int
    head: int | None
    group: NotRequired[int]
    statistic: str
    product: str
    value: float


class BalanceRecord(TypedDict):
    """What weight decay makes equal, of one group of heads: norms of rows, and the norms of factors and product."""

    own: list[float]
    shared: list[float]
    frobenius: float
    nuclear: float


class WeightAlert(TypedDict):
    """A figure of the weights beyond its limit, what that means, what helps and who showed it."""

    alert: str
    site: str
    depth: int | None
    head: int | None
    statistic: str
    value: float
    threshold: float
    sentence: str
    remedy: str
    source: str


class Layer(TypedDict):
    """One attention layer of a checkpoint: its heads, and which figures cannot be had or have no meaning there and
    why."""

    site: str
    depth: int
    stack: str
    cross: bool
    layout: str | None
    missing: dict[str, str]
    notes: list[str]
    reasons: dict[str, str]
    heads: NotRequired[int]
    kv_heads: NotRequired[int]


class WorstHead(TypedDict):
    """A head, how far its figures lie out on the worrying side, and the figures that weigh most, in words."""

    site: str
    depth: int | None
    head: int
    score: float
    reasons: list[str]


# Of the weights, or read on data.
AuditRecord = WeightRecord | DataRecord
AuditAlert = WeightAlert | Alert


def group_of(record: Mapping[str, Any]) -> int | None:
    """Return the number of the group of heads that a figure belongs to; None for a figure of a head or a layer."""
    return record.get("group")


def place_of(record: AuditRecord | AuditAlert | WorstHead, site: str | None = None) -> str:
    """Name the head, group or layer of a record; `site` names its layer in other words."""
    name = record["site"] if site is None else site
    if (group := group_of(record)) is not None:
        return f"{name} group {group}"
    return name if record["head"] is None else f"{name} head {record['head']}"
