"""Write the files of a report beside the results that it shows."""

from __future__ import annotations

import json
import os
from pathlib import Path

from headwise.comparing.report.findings_page import findings_page
from headwise.comparing.report.plain_tables import findings_csv, findings_markdown, study_csv, study_markdown
from headwise.comparing.report.study_page import study_page
from headwise.comparing.results.folder import read_study
from headwise.comparing.results.records import read_json


def rebuild(folder) -> Path:
    """Rebuild the report of `folder`; see `headwise.comparing.report.write`."""
    path = Path(folder)
    if (path / "study.json").is_file():
        files = _study_files(path)
    elif (path / "findings.json").is_file():
        files = _findings_files(path)
    else:
        raise FileNotFoundError(
            f"{path} holds neither study.json nor findings.json, so there is nothing to report. Give the folder that --out named."
        )
    try:
        for name, text in files.items():
            _replace(path / name, text)
    except OSError as error:
        from headwise.files.errors import explain

        raise explain(error, path) from error
    return path / "report.html"


def _findings_files(path: Path) -> dict[str, str]:
    findings = read_json(path / "findings.json")
    try:
        return {
            "report.html": findings_page(findings),
            "table.csv": findings_csv(findings),
            "table.md": findings_markdown(findings),
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path / 'findings.json'} does not hold what a study writes ({type(error).__name__}: {error}). Run the study again."
        ) from error


def _study_files(path: Path) -> dict[str, str]:
    from headwise.comparing.results.analysis import analyse_study

    study = read_study(path)
    analysis = analyse_study(study)
    return {
        "analysis.json": json.dumps(analysis, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        "table.csv": study_csv(analysis),
        "table.md": study_markdown(analysis),
        "report.html": study_page(study, analysis),
    }


def _replace(path: Path, text: str) -> None:
    # A report that is open in a browser, or cut off by a full disk, is never half a file.
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    _clear_scratch(path)
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _clear_scratch(path: Path) -> None:
    """Remove what a process left that was killed while it wrote this file."""
    import psutil

    for scratch in path.parent.glob(f".{path.name}.*"):
        number = scratch.suffix[1:]
        if number.isdigit() and not psutil.pid_exists(int(number)):
            scratch.unlink(missing_ok=True)
