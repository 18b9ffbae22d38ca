"""Lay out the report of findings: a study that is no table of arms and seeds."""

from __future__ import annotations

from typing import Any

from headwise.pages.line_charts import lines
from headwise.pages.shell import Column, Section, figure, grid, page, pairs, prose, table
from headwise.reporting.claims_section import claims_section
from headwise.reporting.run_records import repeat
from headwise.results.findings_record import ChartRecord, FindingsRecord, TableRecord


def findings_page(findings: FindingsRecord) -> str:
    """Return the report of findings as one HTML page; their first paragraph is the answer and stands on top."""
    paragraphs = findings.paragraphs
    sections = [
        *claims_section(findings.claims),
        *([Section("What was found", prose(paragraphs[1:]))] if len(paragraphs) > 1 else []),
        *_charts(findings),
        *(Section(found.title, _table(found)) for found in findings.tables),
        Section("Settings", pairs(findings.settings), collapsed=True),
        Section("How to repeat it", repeat(findings)),
    ]
    return page(
        findings.title or findings.name or "Findings",
        sections,
        eyebrow="headwise · findings",
        question=findings.question,
        lead=paragraphs[0] if paragraphs else "",
    )


def _charts(findings: FindingsRecord) -> list[Section]:
    charts = [_chart(found) for found in findings.charts if found.data]
    return [Section("Charts", grid(charts, wide=True))] if charts else []


def _chart(found: ChartRecord) -> Any:
    flags = {"log_x": found.log_x, "log_y": found.log_y, "points": found.points}
    chart = lines(found.data, x=found.x, y=found.y, series=found.series, **flags)
    return figure(chart, title=found.title, caption=found.caption)


def _table(found: TableRecord) -> Any:
    columns = [Column(name, number=_numeric(found.rows, at)) for at, name in enumerate(found.columns)]
    return table(columns, found.rows, caption=found.title)


def _numeric(rows: list[list[Any]], at: int) -> bool:
    values = [row[at] for row in rows if row[at] is not None]
    return bool(values) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
