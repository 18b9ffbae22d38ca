"""Lay out the report of findings: a study that is no table of methods and seeds."""

from __future__ import annotations

from headwise.comparing.report.run_records import repeat
from headwise.pages.line_charts import lines
from headwise.pages.shell import Column, Section, figure, grid, page, pairs, prose, table


def findings_page(findings: dict) -> str:
    """Return the report of a findings.json as one HTML page; its first paragraph is the answer and stands on top."""
    paragraphs = list(findings.get("paragraphs", []))
    sections = [
        *([Section("What was found", prose(paragraphs[1:]))] if len(paragraphs) > 1 else []),
        *_charts(findings),
        *(Section(found["title"], _table(found)) for found in findings.get("tables", [])),
        Section("Settings", pairs(findings.get("settings", {})), collapsed=True),
        Section("How to repeat it", repeat(findings)),
    ]
    return page(
        findings.get("title") or findings.get("name", "Findings"),
        sections,
        eyebrow="headwise · findings",
        question=findings.get("question", ""),
        lead=paragraphs[0] if paragraphs else "",
    )


def _charts(findings: dict) -> list[Section]:
    charts = [_chart(found) for found in findings.get("charts", []) if found["data"]]
    return [Section("Charts", grid(charts, wide=True))] if charts else []


def _chart(found: dict):
    flags = {name: bool(found.get(name)) for name in ("log_x", "log_y", "points")}
    chart = lines(found["data"], x=found["x"], y=found["y"], series=found.get("series"), **flags)
    return figure(chart, title=found["title"], caption=found.get("caption", ""))


def _table(found: dict):
    columns = [Column(str(name), number=_numeric(found["rows"], at)) for at, name in enumerate(found["columns"])]
    return table(columns, found["rows"])


def _numeric(rows, at: int) -> bool:
    values = [row[at] for row in rows if row[at] is not None]
    return bool(values) and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
