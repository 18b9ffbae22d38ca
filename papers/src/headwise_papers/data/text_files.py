"""Read text files and tables by name: what does not fit is refused with the file and the line."""

from __future__ import annotations

from pathlib import Path

from headwise.study import StudyError

AGAIN = "Delete it and start again: it is downloaded anew."


def read_text(path: Path) -> str:
    """Read a file in UTF-8; raise StudyError with its name when it is absent or no such text."""
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise StudyError(
            f"{path} is missing. Name its folder by --data, or leave --data out to have it downloaded."
        ) from error
    except UnicodeDecodeError as error:
        raise StudyError(f"{path} is no text in UTF-8: byte {error.start}. {AGAIN}") from error


def read_lines(path: Path) -> list[str]:
    """Read the lines of a file; only a line feed ends one, and a carriage return before it goes."""
    lines = read_text(path).split("\n")
    return [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]


def read_rows(path: Path, columns: int, *, more: bool = False, header: tuple[str, ...] = ()) -> list[list[str]]:
    """Read a tab-separated table without quotes: rows of `columns` cells, or of at least so many with `more`.

    Raises StudyError that names the first line with another number of cells, and a `header` that is not the file's.
    """
    rows = [line.split("\t") for line in read_lines(path)]
    if not rows:
        raise StudyError(f"{path}, line 1: it is empty. {AGAIN}")
    if header and tuple(rows[0]) != header:
        raise StudyError(f"{path}, line 1: {rows[0]} where the header {list(header)} must stand. {AGAIN}")
    for number, row in enumerate(rows, start=1):
        if len(row) != columns and not (more and len(row) > columns):
            raise StudyError(f"{path}, line {number}: {len(row)} columns where {columns} must stand. {AGAIN}")
    return rows[1:] if header else rows


def read_number(text: str, low: float, high: float, path: Path, line: int) -> float:
    """Read a number in [low, high]; raise StudyError with the file and the line for anything else."""
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not low <= number <= high:
        raise StudyError(f"{path}, line {line}: {text!r} is no number from {low:g} to {high:g}. {AGAIN}")
    return number


def refuse_empty(path: Path, texts: list[str], what: str) -> None:
    """Raise StudyError that counts and names empty lines; a pair or a transcript without words teaches nothing."""
    empty = [number for number, text in enumerate(texts, start=1) if not text.strip()]
    if empty:
        some = ", ".join(map(str, empty[:5])) + (", …" if len(empty) > 5 else "")
        raise StudyError(f"{path}: {len(empty)} empty {what}, in line {some}. {AGAIN}")


def split_name(split: str, names: dict[str, str]) -> str:
    """Return the name under which the files know a split; raise ValueError with those that exist."""
    if split not in names:
        raise ValueError(f"There is no split {split!r}; there are {', '.join(names)}.")
    return names[split]
