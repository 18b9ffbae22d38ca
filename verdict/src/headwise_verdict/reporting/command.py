"""The command `headwise report`: rebuilding reports, exporting them, and combining several studies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwise_verdict.files.errors import StudyError
from headwise_verdict.reporting.export import export as write_out
from headwise_verdict.reporting.numbers import study_of_numbers
from headwise_verdict.reporting.rebuild import rebuild
from headwise_verdict.reporting.table_rows import is_table
from headwise_verdict.results.across import across, across_words
from headwise_verdict.results.analysis_record import stranger_words
from headwise_verdict.results.json_answer import results_of
from headwise_verdict.results.stored import checked_analysis
from headwise_verdict.results.table import print_answer, print_sentences


def report_numbers(
    path: Path,
    outcomes: Sequence[str],
    baseline: str,
    *,
    arm: str = "",
    seed: str = "",
    settings: Sequence[str] = (),
    out: Path | None = None,
    export: Path | None = None,
) -> Path:
    """Convert a table of numbers into a study's folder, write its report, print its answer, and return the page's path.

    The folder is next to the table unless `out` names another.

    Raises:
        StudyError: see `study_of_numbers`.
    """
    folder = out or path.with_name(f"{path.stem}-report")
    notes = study_of_numbers(path, outcomes, baseline, folder, arm=arm, seed=seed, settings=settings)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    show_report(folder)
    if export is not None:
        print(f"{len(write_out(folder, export))} files in {export}")
    return folder / "report.html"


def report(
    paths: Sequence[Path],
    outcomes: Sequence[str] = (),
    baseline: str = "baseline",
    *,
    arm: str = "",
    seed: str = "",
    settings: Sequence[str] = (),
    out: Path | None = None,
    export: Path | None = None,
) -> dict[str, Any]:
    """Rebuild the reports of folders, or report one table of runs, and return the answers for --json.

    Raises:
        StudyError: for several tables, and for options of a table with a folder; see `report_numbers` and `run`.
    """
    tables = [path for path in paths if is_table(path)]
    if tables and len(paths) > 1:
        raise StudyError(f"{tables[0]} is a table of numbers. Report one table at a time.")
    if tables:
        columns = [name.strip() for text in settings for name in text.split(",") if name.strip()]
        options: dict[str, Any] = {"arm": arm, "seed": seed, "settings": columns, "out": out, "export": export}
        return results_of([report_numbers(tables[0], outcomes, baseline, **options).parent])
    if outcomes or arm or seed or settings or out:
        raise StudyError(
            f"--outcome, --arm, --seed-column, --settings and --out are for tables, and {paths[0]} is a folder of "
            "results: leave them out."
        )
    return run(paths, export)


def show_report(folder: Path) -> None:
    """Write the report of a folder, and print its answer and the page's path."""
    page = rebuild(folder)
    print_answer(folder)
    print(f"\nreport: {page}")


def run(folders: Sequence[Path], export: Path | None) -> dict[str, Any]:
    """Rebuild the report of each folder, print the path of its page, and return the answers for --json.

    Several folders are taken as data sets of one question, and their differences are aggregated arm by arm. Raises
    StudyError if `export` is given for folders of the same name, and the errors of `headwise_verdict.reporting.write`.
    """
    names = [folder.resolve().name for folder in folders]
    if export is not None and len(set(names)) < len(names):
        raise StudyError(f"--export {export}: {', '.join(names)} are names of several folders. Export them one by one.")
    for folder, name in zip(folders, names):
        print(rebuild(folder))
        for words in _damage(folder):
            print(f"note: {words}", file=sys.stderr)
        if export is not None:
            target = export if len(folders) == 1 else export / name
            print(f"{len(write_out(folder, target))} files in {target}")
    together = across(folders) if len(folders) > 1 else {}
    if together:
        print_sentences(["", *across_words(together)])
    return results_of(folders, together)


def _damage(folder: Path) -> list[str]:
    if not (folder / "study.json").is_file():
        return []
    analysis = checked_analysis(folder / "analysis.json")
    return [run.words for run in analysis.damaged] + [stranger_words(name) for name in analysis.strangers]
