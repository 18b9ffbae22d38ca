"""What a study that is no table of arms and seeds writes down: its sentences, tables and charts."""

from __future__ import annotations

from typing import Any

from headwise.results.claim_record import JudgedClaim
from headwise.results.records import Record


class TableRecord(Record):
    """Hold one table of findings."""

    title: str
    columns: list[str]
    rows: list[list[Any]]


class ChartRecord(Record):
    """Hold one chart of findings: rows, which of their fields are drawn against which, and how."""

    title: str
    x: str
    y: str
    data: list[dict[str, Any]]
    series: str | None = None
    caption: str = ""
    log_x: bool = False
    log_y: bool = False
    points: bool = False


class FindingsRecord(Record):
    """Hold what findings.json says; the first paragraph is the answer."""

    name: str = ""
    scale: str = ""
    title: str = ""
    question: str = ""
    paragraphs: list[str] = []
    tables: list[TableRecord] = []
    charts: list[ChartRecord] = []
    # judged by the study itself, from its own checked numbers
    claims: list[JudgedClaim] = []
    settings: dict[str, Any] = {}
    command: str | list[str] = ""
    commit: str | None = None
    versions: dict[str, Any] | None = None
    hardware: dict[str, Any] | None = None
    notes: list[str] = []
    # that the study took, training and drawing of figures and all
    seconds: float | None = None
