"""Reports: one self-contained HTML page, its tables as CSV, Markdown and LaTeX, and its analysis as JSON."""

from __future__ import annotations

from pathlib import Path


def write(folder: str | Path) -> Path:
    """Rebuild the report of a study folder and return the path of its report.html.

    Writes report.html, table.csv, table.md and table.tex, and for a study runs.csv and epochs.csv (every outcome by run
    and by epoch) and analysis.json. Raises FileNotFoundError if the folder contains neither study.json nor
    findings.json.

    Example:
        >>> import shutil, tempfile
        >>> from headwise_verdict.reporting import write
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write(folder)
        Traceback (most recent call last):
        FileNotFoundError: ... holds neither study.json nor findings.json, so there is nothing to report. Give the
        folder that --out named.
    """
    from headwise_verdict.reporting.rebuild import rebuild

    return rebuild(folder)
