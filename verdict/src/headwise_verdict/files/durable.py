"""Files that survive a crash: written whole or not at all, and line streams that may end in a torn line.

A file that is not whole yet is made exclusively, under a name that no other process takes, and never through a link.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from headwise_verdict.files.foreign_text import read_as_json

# absent on Windows
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
CLOEXEC = getattr(os, "O_CLOEXEC", 0)
# the name of a file that is not whole yet, with the number of the process that writes it
PARTIAL = re.compile(r"\..+\.(\d+)-[0-9a-f]{8}\.partial")


def open_to_append(path: Path) -> io.FileIO:
    """Open a file, which is made if there is none, for appending bytes without a buffer; raise OSError for a link."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NOFOLLOW | CLOEXEC, 0o666)
        return open(descriptor, "ab", 0)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, and headwise writes through no links", str(path)) from None
        raise


def append(path: Path, content: bytes) -> None:
    """Append to a file, which is made if there is none; raise OSError if it is a link."""
    with open_to_append(path) as stream:
        write_all(stream, content)


def write_all(stream: io.FileIO, content: bytes) -> None:
    """Write all of `content`; one call of `write` may write only a part, as on a disk that becomes full."""
    rest = memoryview(content)
    while rest:
        rest = rest[stream.write(rest) :]


@contextmanager
def writing(path: Path, *, flush: bool = True) -> Iterator[BinaryIO]:
    """Yield the stream of a new file, which takes the place of `path` at the end of the block, unless it raises.

    With `flush`, it is on the disk before, so that readers see the old file or the new one even after a power cut.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW | CLOEXEC, 0o666)
    try:
        with open(descriptor, "wb") as stream:
            yield stream
            if flush:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if flush:
        _flush_folder(path.parent)


def write_bytes(path: Path, content: bytes, *, flush: bool = True) -> None:
    """Write a file, whole or not at all; see `writing`."""
    with writing(path, flush=flush) as stream:
        stream.write(content)


def clear_partials(folder: Path) -> None:
    """Remove the files of a folder that processes were writing when they were killed."""
    import psutil

    for path in folder.glob(".*.partial"):
        name = PARTIAL.fullmatch(path.name)
        if name and not path.is_symlink() and not psutil.pid_exists(int(name[1])):
            path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write_bytes(path, (json.dumps(finite(value), indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any | None:
    """Return the content of a JSON file, or None if it is absent or torn."""
    try:
        return read_as_json(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one record to a line stream in a single write."""
    append(path, as_line(record).encode())


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
            record = read_as_json(line)
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
