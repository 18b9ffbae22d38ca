"""The rows of a table of runs as read from a file: CSV or TSV with a heading, or JSON objects."""

from __future__ import annotations

import ast
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise_verdict.files.errors import StudyError
from headwise_verdict.files.foreign_text import printable

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json")
# columns that contain a whole dict, as written by Weights & Biases' recommended export and trackio's query
DICTS = ("config", "summary", "metrics")
TAB = "\t"
# numbers with a decimal comma, as in spreadsheets whose fields are separated by semicolons
DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class Row:
    """One row of a table; `line` is its line in an editor, where the heading is line 1.

    `losses` are those of the run's earlier rows and of this one, in the order of their steps: step, name and value.
    """

    line: int
    values: dict[str, Any]
    losses: tuple[tuple[int, str, float], ...] = ()


def is_table(path: Path) -> bool:
    """Return whether a path is a table of numbers rather than a folder."""
    return path.is_file() or path.suffix.lower() in SUFFIXES


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a table: CSV or TSV with a heading, or JSON objects, one per line or in a list.

    Entries of nested objects are named with dots.

    Raises:
        StudyError: if the file is missing or empty, or a line is not a row.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise StudyError(f"{path} does not exist in {Path.cwd()}. Give the path of a CSV or JSONL file.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise StudyError(f"{path} cannot be read as text ({error}). Give a CSV or JSONL file in UTF-8.") from error
    readers = {".json": _of_whole_json, ".jsonl": _of_json, ".ndjson": _of_json}
    rows = list(readers.get(path.suffix.lower(), _of_csv)(path, text))
    if not rows:
        raise StudyError(f"{path} contains no rows. Give a table with a heading and one row per run.")
    return [Row(row.line, printable(row.values)) for row in rows]


def names_of(rows: Iterable[Row]) -> list[str]:
    """Return the names of the columns in the order of their first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.values))


def _of_json(path: Path, text: str) -> Iterable[Row]:
    # a string of JSON may hold U+2028 or U+0085, at which splitlines() splits
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            values = _flat(record) if isinstance(record, dict) else None
        except (ValueError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise StudyError(
                f"{path}, line {number}, is not valid JSON: {why[0].lower()}{why[1:]}. Complete the line, or delete it "
                "if its writer was interrupted."
            ) from error
        if values is None:
            raise StudyError(
                f'{path}, line {number}, is not a JSON object. Give one run per line: {{"arm": ..., "seed": ...}}.'
            )
        yield Row(number, _unfolded(path, number, values))


def _of_whole_json(path: Path, text: str) -> Iterable[Row]:
    """Yield the rows of a JSON list of runs, or of the output of `trackio query --json`, whose "rows" is the list."""
    try:
        content = json.loads(text)
        rows = content.get("rows") if isinstance(content, dict) else content
        listed = rows if isinstance(rows, list) and all(isinstance(row, dict) for row in rows) else None
        flat = None if listed is None else [_flat(row) for row in listed]
    except (ValueError, RecursionError) as error:
        raise StudyError(
            f"{path} is not valid JSON: {error}. Give a list of runs, or one run per line in a .jsonl file."
        ) from error
    if flat is None:
        raise StudyError(f'{path} contains no list of runs. Write [{{"arm": ..., "seed": ...}}, ...].')
    for number, values in enumerate(flat, 1):
        yield Row(number, _unfolded(path, number, values))


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in nested.items():
        values |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return values


def _of_csv(path: Path, text: str) -> Iterable[Row]:
    # without translation, so that a line ends where the csv module ends it, and at no U+2028
    lines = io.StringIO(text, newline="")
    heading = lines.readline()
    lines.seek(0)
    mark = TAB if path.suffix.lower() == ".tsv" else ";" if heading.count(";") > heading.count(",") else ","
    names: list[str] = []
    for line, values in _fields(path, lines, mark):
        if not names:
            names = [name.strip() for name in values]
            repeated = [name for name, count in Counter(names).items() if count > 1 and name]
            if repeated:
                raise StudyError(f"{path} has two columns {repeated[0]!r}. Rename one.")
        elif any(value.strip() for value in values):
            if len(values) != len(names):
                raise StudyError(
                    f"{path}, row {line}, has {len(values)} fields, and the heading has {len(names)}. Put "
                    f"a field that holds {'a tab' if mark == TAB else repr(mark)} into quotes, or repair the row."
                )
            if mark == ";":
                values = [v.replace(",", ".") if DECIMAL_COMMA.fullmatch(v.strip()) else v for v in values]
            yield Row(line, _unfolded(path, line, dict(zip(names, map(str.strip, values)))))


def _fields(path: Path, lines: Iterable[str], mark: str) -> Iterable[tuple[int, list[str]]]:
    """Yield the fields of each row with its line."""
    reader = csv.reader(lines, delimiter=mark)
    try:
        for values in reader:
            yield reader.line_num, values
    except csv.Error as error:
        raise StudyError(f"{path}, row {reader.line_num + 1}, is not CSV: {error}. Repair the row.") from error


def _unfolded(path: Path, line: int, values: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose cells that contain a dict, in Python or JSON syntax, are replaced by its entries."""
    entries: dict[str, Any] = {}
    for name, value in values.items():
        if name.lower() not in DICTS or not isinstance(value, str) or not value.startswith("{"):
            entries[name] = value
            continue
        try:
            # Python writes nan and inf, which literal_eval does not read
            content = ast.literal_eval(re.sub(r"(?<=: )-?(nan|inf)(?=[,}])", "None", value))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            try:
                content = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise StudyError(
                    f"{path}, row {line}: {name} is not a readable dict. Export its entries as columns."
                ) from error
        if not isinstance(content, dict):
            raise StudyError(f"{path}, row {line}: {name} is not a readable dict. Export its entries as columns.")
        entries |= _flat(content, f"{name.lower()}.")
    return entries
