"""Files that survive a crash: written whole or not at all, and line streams that may end in a torn line."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, flush it to disk and rename it, so that readers see the old or the new."""
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    _flush_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write_bytes(path, (json.dumps(finite(value), indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any | None:
    """Return the content of a JSON file, or None if it is absent or torn."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one record to a line stream in a single write."""
    with open(path, "a", encoding="utf-8") as stream:
        stream.write(as_line(record))


def as_line(record: dict[str, Any]) -> str:
    """Return a record as one line of JSON."""
    return json.dumps(finite(record), allow_nan=False) + "\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a line stream, without a last line that was torn while it was written."""
    if not path.exists():
        return []
    *whole, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for line in whole:
        try:
            record = json.loads(line)
        except ValueError:
            break
        if isinstance(record, dict):
            records.append(record)
    return records


def lines_of(text: str) -> list[str]:
    """Return the lines of a stream of JSON, which end at a line feed alone: strings may hold U+2028 and U+0085."""
    *lines, last = text.split("\n")
    return [*lines, last] if last else lines


def restore_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Write a line stream with exactly these records, only if it differs from them."""
    content = "".join(as_line(record) for record in records).encode()
    if (path.read_bytes() if path.exists() else b"") != content:
        write_bytes(path, content)


def finite(value: Any) -> Any:
    """Return the value with None for NaN and infinities, which JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
