"""What `headwise report` does: rebuild reports, export them, and put several studies together."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from headwise.files.errors import StudyError
from headwise.reporting.export import export as write_out
from headwise.reporting.rebuild import rebuild
from headwise.results.across import across, across_words
from headwise.results.analysis_record import stranger_words
from headwise.results.stored import checked_analysis
from headwise.results.table import print_sentences


def run(folders: Sequence[Path], export: Path | None) -> None:
    """Rebuild the report of each folder and print its page; several folders are data sets of one question, put together arm by arm.

    Raises StudyError for two folders of one name that are to be exported into one folder, and what `headwise.reporting.write` raises.
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
    if len(folders) > 1:
        print_sentences(["", *across_words(across(folders))])


def _damage(folder: Path) -> list[str]:
    if not (folder / "study.json").is_file():
        return []
    found = checked_analysis(folder / "analysis.json")
    return [run.words for run in found.damaged] + [stranger_words(name) for name in found.strangers]
