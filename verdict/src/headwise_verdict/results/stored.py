"""Readers of a study's files that check their content and name the file and the entry at fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from headwise_verdict.files.durable import numbered_lines
from headwise_verdict.files.foreign_text import printable, read_as_json
from headwise_verdict.results.analysis_record import Analysis, FindingsRecord
from headwise_verdict.results.digests import digest_of
from headwise_verdict.results.records import CellRecord, EpochLine, MapsRecord, RunResult, StoredRecord, StudyRecord

R = TypeVar("R", bound=StoredRecord)

AGAIN = "Delete it and run the study again, which continues where it stopped."


def checked_study(path: Path) -> StudyRecord:
    """Return the content of study.json; raise ValueError naming each missing or invalid entry."""
    content = _dictionary(path)
    try:
        return _valid(StudyRecord, content)
    except ValidationError as error:
        names = dict.fromkeys(str(problem["loc"][0]) for problem in error.errors() if problem["loc"])
        missing = [name for name in names if name not in content]
        invalid = [name for name in names if name in content]
        words = [f"lacks {', '.join(missing)}"] if missing else []
        words += [f"has invalid values for {', '.join(invalid)}"] if invalid else []
        raise ValueError(f"{path} {' and '.join(words)}; run `headwise compare` on this folder again.") from error


def _checked(kind: type[R], wrong: str, path: Path) -> R:
    """Return the content of a file; raise ValueError with its path and what is wrong if it is invalid."""
    try:
        return _valid(kind, _dictionary(path))
    except ValidationError as error:
        raise ValueError(f"{path} {wrong.format(places=_places(error))}") from error


# the readers of the other files, each of which takes its path
checked_analysis = partial(
    _checked,
    Analysis,
    "is not a valid analysis (see {places}). Write it again: run `headwise report` on the folder of its study.",
)
checked_findings = partial(
    _checked, FindingsRecord, "is not a valid record of findings (see {places}). Run the study again."
)
checked_config = partial(_checked, CellRecord, f"does not name an arm and a seed. {AGAIN}")
checked_result = partial(
    _checked,
    RunResult,
    "contains no valid result: {places} is missing or invalid (a result has a status, finished or diverged, an arm, a "
    f"seed and metrics). {AGAIN}",
)
checked_maps = partial(_checked, MapsRecord, f"contains no valid attention maps (see {{places}}). {AGAIN}")


def read_epochs(path: Path) -> list[EpochLine]:
    """Return the lines of metrics.jsonl; raise ValueError for an invalid line."""
    lines = []
    for number, record in numbered_lines(path):
        try:
            lines.append(_valid(EpochLine, record))
        except ValidationError as error:
            names = _places(error)
            if "epoch" in names.split(", "):
                raise ValueError(f"{path}, line {number}, does not name an epoch. {AGAIN}") from error
            raise ValueError(f"{path}, line {number}, has invalid values for {names}. {AGAIN}") from error
    return lines


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file whose content, valid in itself, led to an error that has no words for users.

    Raises:
        ValueError: instead of RecursionError, KeyError, IndexError and OverflowError, and of a ValueError that names no
            file of the same folder.
    """
    try:
        yield
    except (RecursionError, LookupError, OverflowError, ValueError) as error:
        if isinstance(error, ValueError) and str(path.parent) in str(error):
            raise
        raise ValueError(
            f"{path} holds something that headwise does not write ({type(error).__name__}: {error}). {AGAIN}"
        ) from error


def _places(error: ValidationError) -> str:
    return ", ".join(dict.fromkeys(".".join(map(str, problem["loc"])) for problem in error.errors()))


def _valid(kind: type[R], content: Any) -> R:
    shown = printable(content)
    if kind is StudyRecord and shown != content and content.get("ledger") == digest_of(content.get("runs")):
        # the ledger is of the names as they were written
        shown["ledger"] = digest_of(shown["runs"])
    # strict validation: the string "3" is not accepted as a seed
    return kind.model_validate_json(json.dumps(shown), strict=True)


def read_whole_json(path: Path) -> Any:
    """Return the content of a JSON file; raise ValueError naming the file if it is damaged."""
    try:
        return read_as_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}). {AGAIN}") from error


def _dictionary(path: Path) -> dict[str, Any]:
    content = read_whole_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} contains {json.dumps(content)[:40]} instead of a dictionary. {AGAIN}")
    return content
