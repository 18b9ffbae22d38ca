"""Reading of text files and tables, with errors that name the file and the line."""

from __future__ import annotations

from pathlib import Path

from headwise.study import StudyError

AGAIN = "Delete it and start again: it is downloaded again."


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file; raise StudyError with its name if it is missing or invalid."""
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise StudyError(
            f"{path} is missing. Name its folder by --data, or leave --data out to have it downloaded."
        ) from error
    except UnicodeDecodeError as error:
        raise StudyError(f"{path} is not a text in UTF-8: byte {error.start}. {AGAIN}") from error


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file, ended by line feeds only; a carriage return before a line feed is removed."""
    lines = read_text(path).split("\n")
    return [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]


def read_rows(path: Path, columns: int, *, more: bool = False, header: tuple[str, ...] = ()) -> list[list[str]]:
    """Return the rows of a tab-separated table without quotes, of `columns` cells or, with `more`, at least as many.

    Raises StudyError naming the first line with another number of cells, and for a header other than `header`.
    """
    rows = [line.split("\t") for line in read_lines(path)]
    if not rows:
        raise StudyError(f"{path}, line 1: it is empty. {AGAIN}")
    if header and tuple(rows[0]) != header:
        raise StudyError(f"{path}, line 1: {rows[0]} instead of the header {list(header)}. {AGAIN}")
    for number, row in enumerate(rows, start=1):
        if len(row) != columns and not (more and len(row) > columns):
            raise StudyError(f"{path}, line {number}: {len(row)} columns instead of {columns}. {AGAIN}")
    return rows[1:] if header else rows


def read_number(text: str, low: float, high: float, path: Path, line: int) -> float:
    """Return a number in [low, high] from text; raise StudyError with the file and the line for anything else."""
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not low <= number <= high:
        raise StudyError(f"{path}, line {line}: {text!r} is not a number from {low:g} to {high:g}. {AGAIN}")
    return number


def refuse_empty(path: Path, texts: list[str], what: str) -> None:
    """Raise StudyError with the number of empty texts and their lines, if any."""
    empty = [number for number, text in enumerate(texts, start=1) if not text.strip()]
    if empty:
        some = ", ".join(map(str, empty[:5])) + (", …" if len(empty) > 5 else "")
        raise StudyError(f"{path}: {len(empty)} empty {what}, in line {some}. {AGAIN}")


def split_name(split: str, names: dict[str, str]) -> str:
    """Return the name of a split in the files; raise ValueError with the existing splits for an unknown one."""
    if split not in names:
        raise ValueError(f"There is no split {split!r}; the splits are {', '.join(names)}.")
    return names[split]
