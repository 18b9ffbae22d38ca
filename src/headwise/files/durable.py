"""Files that survive a crash: written whole or not at all.

A file that is not whole yet is made exclusively, under a name that no other process takes, and never through a link.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

# absent on Windows
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
CLOEXEC = getattr(os, "O_CLOEXEC", 0)


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


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write_bytes(path, (json.dumps(finite(value), indent=1, allow_nan=False) + "\n").encode())


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
