"""The rows of a table of runs in a file (CSV or TSV with a heading, or JSON objects), and the values of their cells."""

from __future__ import annotations

import ast
import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise_verdict.files.errors import StudyError
from headwise_verdict.files.foreign_text import printable

# the numbers of CSV and JSON; Python also reads 1_0 as 10, and the digits of other scripts
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)
# 3 as pandas writes it in a column that lacks a value
WHOLE = re.compile(r"([+-]?\d+)(\.0*)?", re.ASCII)
# texts that replace a figure that a run lacks
INFINITE = ("inf", "+inf", "-inf", "infinity", "+infinity", "-infinity")
MISSING = ("", "nan", "none", "null", "na", "n/a", "<na>", *INFINITE)
# every whole number below this is a float exactly
EXACT = 2**53
# digits of the longest seed that Python converts at once
LONGEST = 4000


def figure_of(value: Any) -> float | None:
    """Return the finite number that a cell holds, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and not NUMBER.fullmatch(value.strip()):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def is_missing(value: Any) -> bool:
    """Return whether a cell holds no figure, as one of a run that did not record it."""
    return value is None or (not isinstance(value, bool) and str(value).strip().lower() in MISSING)


def seed_of(value: Any) -> int | None:
    """Return the whole number of any size that a cell holds, or None; a rounded one, as 1.8e19, is None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    text = str(value).strip()
    if match := WHOLE.fullmatch(text):
        # a float of Python that is this long was rounded
        is_float = isinstance(value, float) and abs(value) >= EXACT
        return None if is_float or len(match[1]) > LONGEST else int(match[1])
    number = figure_of(value)
    return int(number) if number is not None and number == int(number) and abs(number) < EXACT else None


def same_value(one: Any, other: Any) -> bool:
    """Return whether two cells hold the same setting: 0.1 and "0.10" do."""
    for read in (seed_of, figure_of):
        numbers = read(one), read(other)
        if None not in numbers:
            return numbers[0] == numbers[1]
    return ("" if one is None else str(one)) == ("" if other is None else str(other))


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
