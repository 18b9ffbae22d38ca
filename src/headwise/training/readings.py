"""Readings of a watched run beside its checkpoint: a run goes on from both together, or from its beginning."""

from __future__ import annotations

import hashlib
from pathlib import Path

from headwise.files.durable import read_lines, restore_lines, write_bytes
from headwise.results.digests import HEALTH
from headwise.results.records import Record


class Mark(Record):
    """Say how far the file of readings had come when a checkpoint was written, and what it held."""

    size: int
    sha256: str


def mark(folder: Path, before: Mark | None) -> Mark:
    """Return the mark of a run's readings; `before` is the one of the last checkpoint, which often still holds."""
    path = folder / HEALTH
    if before is not None and path.exists() and path.stat().st_size == before.size:
        return before
    content = path.read_bytes() if path.exists() else b""
    return Mark(size=len(content), sha256=hashlib.sha256(content).hexdigest())


def stands(folder: Path, known: Mark | None) -> bool:
    """Return whether the readings that a checkpoint knows are there; of an earlier version it knows none."""
    return known is None or hashlib.sha256(_until(folder, known)).hexdigest() == known.sha256


def restore_readings(folder: Path, known: Mark | None, step: int) -> None:
    """Make the file hold what the checkpoint at `step` knows, to the byte; what came after is read again."""
    path = folder / HEALTH
    if known is None:
        cut_readings(folder, step)
    elif path.exists() and path.stat().st_size != known.size:
        write_bytes(path, _until(folder, known))


def cut_readings(folder: Path, step: int) -> None:
    """Drop the readings of `step` and later; those of step n were taken before the update n + 1."""
    restore_lines(folder / HEALTH, [record for record in read_lines(folder / HEALTH) if record["step"] < step])


def _until(folder: Path, known: Mark) -> bytes:
    path = folder / HEALTH
    if not path.exists():
        return b""
    with open(path, "rb") as stream:
        return stream.read(known.size)
