"""Digests: a finished run says what its files held, so that what was cut, emptied, doubled or deleted since is seen."""

from __future__ import annotations

import hashlib
from pathlib import Path

from headwise.results.maps_record import MAPS

HEALTH = "health.jsonl"
# what a report reads of a run besides its result; the checkpoint carries a checksum of its own
FILES = ("config.json", "metrics.jsonl", HEALTH, MAPS)


def digests(folder: Path) -> dict[str, str | None]:
    """Give the SHA-256 of each file that belongs to a finished run; None for one that is not there."""
    return {name: _digest(folder / name) for name in FILES}


def damage(folder: Path, written: dict[str, str | None] | None) -> list[str]:
    """Name each file that is no longer what the finished run wrote, and what became of it.

    A result that carries no digests is of a version that wrote none: nothing can be said about its files.
    """
    if written is None:
        return []
    return [
        f"{name} {_what_happened(before, now)}"
        for name, before in written.items()
        if name in FILES and (now := _digest(folder / name)) != before
    ]


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return None


def _what_happened(before: str | None, now: str | None) -> str:
    if now is None:
        return "is gone"
    return "came after the run had finished" if before is None else "is not what the run wrote"
