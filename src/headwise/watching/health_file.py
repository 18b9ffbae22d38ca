"""Health file: the lines that `JsonLines` wrote, read back as the records and alerts they were."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

from headwise.files.health_records import Alert, Line, Record
from headwise.files.optional_imports import load


def read_health(path: Path) -> list[Line]:
    """Read a file of JSON lines; empty where there is none.

    A run that was killed leaves a torn line, which is left out.

    Raises:
        ValueError: naming the file, the line and the field, where a whole line is neither a record nor an alert.
    """
    if not path.is_file():
        return []
    lines: list[Line] = []
    for number, text in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            found = json.loads(text)
        except ValueError:
            continue
        lines.append(_checked(found, path, number))
    return lines


def _checked(found: Any, path: Path, number: int) -> Line:
    pydantic = load("pydantic", "study")
    is_alert = isinstance(found, dict) and "alert" in found
    try:
        return _reader(is_alert).validate_python(_finite_again(found))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the line"
        kind = "alert" if is_alert else "record"
        raise ValueError(f"{path}, line {number}, is no {kind} of health: {where}: {first['msg']}") from None


@cache
def _reader(is_alert: bool) -> Any:
    # One line of a watched run is read hundreds of thousands of times: a reader is built once.
    return load("pydantic", "study").TypeAdapter(Alert if is_alert else Record)


def _finite_again(found: Any) -> Any:
    """Return back the numbers that JSON cannot hold and that were written as null."""
    if not isinstance(found, dict):
        return found
    lost = {"value": math.nan, "low": math.nan, "high": math.nan, "threshold": math.inf}
    return {key: lost[key] if value is None and key in lost else value for key, value in found.items()}
