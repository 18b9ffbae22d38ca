"""The records of an audit: figures of heads and layers, alerts, and layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NotRequired

# From typing_extensions, which torch requires: pydantic supports typing's own only from Python 3.12 on.
from typing_extensions import TypedDict

from headwise.health.health_records import Alert
from headwise.health.health_records import Record as DataRecord


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
    """Norms of one group of heads that weight decay makes equal: those of rows, and those of factors and product."""

    own: list[float]
    shared: list[float]
    frobenius: float
    nuclear: float


class WeightAlert(TypedDict):
    """A figure of the weights beyond its limit, with its meaning, the remedy and the source."""

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
    """One attention layer of a checkpoint: its heads, and why some figures are missing or do not apply."""

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
    """A head, the score of its figures on the unhealthy side, and the largest contributions in words."""

    site: str
    depth: int | None
    head: int
    score: float
    reasons: list[str]


class FiguresOfStatistic(TypedDict):
    """One statistic in short form: whether it is per "head", "group" or "layer", and per site its values in order."""

    per: str
    values: dict[str, list[float]]


# Records and alerts are of the weights or of data.
AuditRecord = WeightRecord | DataRecord
AuditAlert = WeightAlert | Alert


class AuditContent(TypedDict):
    """What `headwise audit --json` prints and audit.json holds; audit.schema.json is its JSON Schema.

    A number that is not finite is null. The fields are those of `AuditResult`; `figures` has the records by statistic.
    """

    # its version: another one if a field changes its meaning or goes
    schema: Literal["headwise.audit/1"]
    checkpoint: str
    kind: str
    model: str
    alerts: list[AuditAlert]
    layers: list[Layer]
    unused: list[str]
    remarks: list[str]
    data: str | None
    reasons: dict[str, dict[str, str]]
    command: str
    versions: dict[str, str]
    commit: str | None
    hardware: dict[str, Any]
    seconds: float
    worst: list[WorstHead]
    notes: list[str]
    figures: dict[str, FiguresOfStatistic]
    spectra: dict[str, list[float]]
    balances: dict[str, BalanceRecord]


def group_of(record: Mapping[str, Any]) -> int | None:
    """Return the number of a figure's group of heads; None for a figure of a head or a layer."""
    return record.get("group")


def place_of(record: AuditRecord | AuditAlert | WorstHead, site: str | None = None) -> str:
    """Return the name of a record's head, group or layer; `site` replaces the name of the layer."""
    name = record["site"] if site is None else site
    if (group := group_of(record)) is not None:
        return f"{name} group {group}"
    return name if record["head"] is None else f"{name} head {record['head']}"
