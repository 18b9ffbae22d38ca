"""The public name for rebuilding a report: `headwise.report.write(folder)`."""

from __future__ import annotations

from pathlib import Path

from headwise.files.optional_imports import needing

__all__ = ["write"]


def __dir__() -> list[str]:
    return sorted(__all__)


def write(folder: str | Path) -> Path:
    """Rebuild the report of a study folder and return the path of its report.html.

    Writes report.html, table.csv, table.md and table.tex, and for a study runs.csv and epochs.csv (every outcome by run
    and by epoch) and analysis.json. Raises FileNotFoundError if the folder contains neither study.json nor
    findings.json, and ImportError naming the extra if a library is missing.

    Example:
        >>> import shutil, tempfile
        >>> import headwise.report
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     headwise.report.write(folder)
        Traceback (most recent call last):
        FileNotFoundError: ... holds neither study.json nor findings.json, so there is nothing to report. Give the
        folder that --out named.
    """
    with needing("A report", "study"):
        from headwise_verdict import write as write_report

        return write_report(folder)
