"""Rebuilding the report of a folder: page, tables and analysis."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise_verdict.files.durable import clear_partials, write_bytes
from headwise_verdict.files.errors import explain
from headwise_verdict.files.ownership import claim
from headwise_verdict.pages.line_charts import lines
from headwise_verdict.pages.shell import Column, Section, figure, grid, page, pairs, prose, table
from headwise_verdict.reporting.optional_sections import claims_section
from headwise_verdict.reporting.plain_tables import (
    epochs_csv,
    findings_csv,
    findings_latex,
    findings_markdown,
    runs_csv,
    study_csv,
    study_latex,
    study_markdown,
)
from headwise_verdict.reporting.study_page import repeat, study_page
from headwise_verdict.results.analysis_record import ChartRecord, FindingsRecord, TableRecord
from headwise_verdict.results.folder import read_study
from headwise_verdict.results.stored import checked_findings, naming


def findings_page(findings: FindingsRecord) -> str:
    """Return the report of findings as one HTML page, with the first paragraph, the answer, at the top."""
    paragraphs = findings.paragraphs
    sections = [
        *claims_section(findings.claims),
        *([Section("What was found", prose(paragraphs[1:]))] if len(paragraphs) > 1 else []),
        *_charts(findings),
        *(Section(one.title, _table(one)) for one in findings.tables),
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
    charts = [_chart(one) for one in findings.charts if one.data]
    return [Section("Charts", grid(charts, wide=True))] if charts else []


def _chart(record: ChartRecord) -> Any:
    flags = {"log_x": record.log_x, "log_y": record.log_y, "points": record.points}
    chart = lines(record.data, x=record.x, y=record.y, series=record.series, **flags)
    return figure(chart, title=record.title, caption=record.caption)


def _table(record: TableRecord) -> Any:
    columns = [Column(name, number=_numeric(record.rows, at)) for at, name in enumerate(record.columns)]
    return table(columns, record.rows, caption=record.title)


def _numeric(rows: list[list[Any]], at: int) -> bool:
    values = [row[at] for row in rows if row[at] is not None]
    return bool(values) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


KEPT = "analysis.json"


def rebuild(folder: str | Path) -> Path:
    """Rebuild the report of `folder`; see `headwise_verdict.reporting.write`."""
    path = Path(folder)
    files = report_files(path)
    write_files(path, files)
    return path / "report.html"


def report_files(path: Path) -> dict[str, str]:
    """Return the files of a folder's report by name; it raises the errors of `headwise_verdict.reporting.write`."""
    for name, files_of in (("study.json", _study_files), ("findings.json", _findings_files)):
        if (path / name).is_file():
            with naming(path / name):
                return files_of(path)
    hint = (
        " It holds the kept analysis of a study, without the runs that a report shows."
        if (path / KEPT).is_file()
        else ""
    )
    raise FileNotFoundError(
        f"{path} holds neither study.json nor findings.json, so there is nothing to report.{hint} Give the folder "
        "that --out named."
    )


def write_files(path: Path, files: Mapping[str, str | bytes], option: str = "") -> None:
    """Write files into a folder, each completely or not at all; `option` is what named it, if not as a study.

    Raises:
        StudyError: if the folder is not writable, or holds others of these names; see `claim`.
    """
    try:
        claim(path, files, option, shared=True)
        for name, content in files.items():
            write_bytes(path / name, content.encode() if isinstance(content, str) else content)
        clear_partials(path)
    except OSError as error:
        raise explain(error, path, option) from error


def _findings_files(path: Path) -> dict[str, str]:
    findings = checked_findings(path / "findings.json")
    try:
        return {
            "report.html": findings_page(findings),
            "table.csv": findings_csv(findings),
            "table.md": findings_markdown(findings),
            "table.tex": findings_latex(findings),
        }
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path / 'findings.json'} is not a valid record of findings ({type(error).__name__}: {error}). Run the "
            "study again."
        ) from error


def _study_files(path: Path) -> dict[str, str]:
    from headwise_verdict.results.analysis import analyse_study

    study = read_study(path)
    analysis = analyse_study(study)
    stored = analysis.model_dump(mode="json")
    return {
        "analysis.json": json.dumps(stored, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        "table.csv": study_csv(analysis),
        "table.md": study_markdown(analysis),
        "table.tex": study_latex(analysis),
        "runs.csv": runs_csv(study),
        "epochs.csv": epochs_csv(study),
        "report.html": study_page(study, analysis),
    }
