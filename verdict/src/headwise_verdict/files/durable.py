"""Files that survive a crash: written whole or not at all, and JSON lines, of which a killed process may tear one.

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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
    for path in folder.glob(".*.partial"):
        name = PARTIAL.fullmatch(path.name)
        if name and not path.is_symlink() and not _may_write(int(name[1])):
            path.unlink(missing_ok=True)


def _may_write(process: int) -> bool:
    """Return whether a process still runs; one that was killed exists until its parent has asked for its end."""
    import psutil

    try:
        return psutil.Process(process).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write_bytes(path, (json.dumps(finite(value), indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any | None:
    """Return the content of a JSON file, or None if it is absent or torn."""
    try:
        return read_as_json(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def as_line(record: Mapping[str, Any]) -> str:
    """Return a record as one line of JSON, with null for NaN and infinities."""
    return json.dumps(finite(record), allow_nan=False) + "\n"


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append records to a file of JSON lines: all of them or, as on a full disk, none.

    A last line without its end, which a killed process leaves, is ended first, so that it spoils no other.
    """
    lines = "".join(map(as_line, records))
    # unbuffered, so that closing the file writes nothing and cannot fail again
    with open_to_append(path) as stream:
        size = stream.seek(0, os.SEEK_END) if stream.seekable() else 0
        try:
            write_all(stream, (_line_end(path, size) + lines).encode())
        except OSError:
            with suppress(OSError):
                stream.truncate(size)
            raise


def _line_end(path: Path, size: int) -> str:
    """Return the line feed that the last line of a file lacks, as after a killed process; else an empty string."""
    if not size:
        return ""
    with path.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return "" if stream.read(1) == b"\n" else "\n"


def as_record(line: str) -> dict[str, Any] | None:
    """Return the record that a line holds, or None if the line is torn: it begins as a record and is no JSON.

    Raises:
        ValueError: for a line that is neither.
    """
    try:
        record = read_as_json(line)
    except ValueError:
        # a power cut can leave zeros in place of what was written
        if line.strip("\0 \r\t")[:1] in ("", "{"):
            return None
        raise
    if not isinstance(record, dict):
        raise ValueError(f"it is {line.strip()[:40]}")
    return record


def numbered_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the records of a file of JSON lines with the numbers of their lines, none if there is no such file.

    A torn line, which a killed process leaves, is left out wherever it stands: what it lacks is nowhere.

    Raises:
        ValueError: for any other line that holds no record; the message has file and line.
    """
    if not path.is_file():
        return []
    records = []
    for number, line in enumerate(lines_of(path.read_text(encoding="utf-8", errors="replace")), 1):
        try:
            record = as_record(line)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}, is no record ({error}). Restore the file, or delete the line."
            ) from error
        if record is not None:
            records.append((number, record))
    return records


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines, as `numbered_lines` does, without numbers."""
    return [record for _, record in numbered_lines(path)]


def lines_of(text: str) -> list[str]:
    """Return the lines of a stream of JSON, which end at a line feed alone: strings may hold U+2028 and U+0085."""
    *lines, last = text.split("\n")
    return [*lines, last] if last else lines


def restore_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Write a file of JSON lines with exactly these records, only if it differs from them."""
    content = "".join(map(as_line, records)).encode()
    if (path.read_bytes() if path.exists() else b"") != content:
        write_bytes(path, content)


def finite(value: Any) -> Any:
    """Return the value with None for NaN and infinities, which JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
