"""Download of a file with resumption, progress messages and a final check."""

from __future__ import annotations

import hashlib
import http.client
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headwise_verdict.files.errors import StudyError

# seconds to wait before each further attempt
WAITS = (1.0, 5.0, 20.0)
# status codes after which another attempt may succeed
PASSING = (408, 429, 500, 502, 503, 504)
CHUNK = 1 << 20
# number of hexadecimal digits of a SHA-256
SHA256 = 64
# seconds without a byte after which a connection counts as interrupted
SILENCE = 30.0


def download(address: str, path: Path, checksum: str | None, tell: Callable[[str], None]) -> None:
    """Download `address` into `path`, continuing an earlier attempt, and check its MD5 or SHA-256.

    `checksum` is in hexadecimal, or None if unknown: every complete download is then accepted. Raises StudyError if
    four attempts fail, or if the complete file is not the official one.
    """
    part = part_of(path)
    for wait in (*WAITS, None):
        try:
            complete = _fetch(address, part, tell)
            name, actual = digest(part, checksum or "")
            if complete or checksum in (None, actual):
                break
            # the server did not announce a size, so the file may be incomplete
            reason: Exception = ConnectionError("the connection ended before the whole file was there")
        except urllib.error.HTTPError as error:
            if error.code not in PASSING:
                raise StudyError(
                    f"{address} answered {error.code} {error.reason}. {_by_hand(address, path)}"
                ) from error
            reason = error
        except (http.client.HTTPException, urllib.error.URLError, TimeoutError, ConnectionError) as error:
            reason = error
        received = part.stat().st_size if part.exists() else 0
        if wait is None:
            raise StudyError(
                f"{address} could not be downloaded: {reason}. {received:,} bytes are kept: start again to resume. "
                f"{_by_hand(address, path)}"
            ) from reason
        tell(f"the download was cut after {received:,} bytes ({reason}); resuming in {wait:g} s")
        time.sleep(wait)
    if checksum not in (None, actual):
        part.unlink()
        raise StudyError(
            f"{address}: what arrived has {name} {actual}, officially it is {checksum}; it was deleted. Start again."
        )
    part.replace(path)


def part_of(path: Path) -> Path:
    """Return the file that holds a download until it is complete."""
    return path.with_name(path.name + ".part")


def digest(path: Path, like: str) -> tuple[str, str]:
    """Return the name and the digest of a file: SHA-256 if `like`, the digest to compare with, is one, else MD5."""
    name, kind = ("SHA-256", "sha256") if len(like) == SHA256 else ("MD5", "md5")
    with open(path, "rb") as stream:
        return name, hashlib.file_digest(stream, kind).hexdigest()


def _fetch(address: str, part: Path, tell: Callable[[str], None]) -> bool:
    """Download the missing part of a file; return whether it is known to be complete."""
    start = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(address, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        answer = urllib.request.urlopen(request, timeout=SILENCE)
    except urllib.error.HTTPError as error:
        error.close()
        # 416: the existing part is already complete
        if error.code == 416 and start:
            return True
        raise
    with answer:
        if answer.status != 206:
            # the server ignored the requested range and sends the whole file
            start = 0
        length = answer.headers.get("Content-Length")
        total = start + int(length) if length else None
        with open(part, "ab" if start else "wb") as stream, _progress(part.stem, start, total, tell) as advance:
            while chunk := answer.read(CHUNK):
                stream.write(chunk)
                advance(len(chunk))
        size = part.stat().st_size
    if total is not None and size < total:
        raise ConnectionError(f"{size:,} of {total:,} bytes arrived")
    # an interrupted chunked answer raises an error, so a chunked answer without one is complete
    return total is not None or answer.chunked


@contextmanager
def _progress(name: str, start: int, total: int | None, tell: Callable[[str], None]) -> Iterator[Callable[[int], None]]:
    if sys.stdout.isatty():
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, TimeRemainingColumn()) as bars:
            line = bars.add_task(name, total=total, completed=start)
            yield lambda size: bars.advance(line, size)
        return
    received, reported = start, start

    def advance(size: int) -> None:
        nonlocal received, reported
        received += size
        # one message per tenth
        if total and received - reported >= total / 10:
            reported = received
            tell(f"{name}: {received / 1e6:.0f} of {total / 1e6:.0f} MB")

    yield advance


def _by_hand(address: str, path: Path) -> str:
    return f"Or fetch {address} yourself and unpack it in {path.parent}, then pass --data {path.parent}."
