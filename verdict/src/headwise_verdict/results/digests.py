"""Digests of a finished run's files and result, which reveal files that were cut, edited or deleted afterwards."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from headwise_verdict.files.durable import finite
from headwise_verdict.results.records import MAPS

HEALTH = "health.jsonl"
RESULT = "result.json"
CHECKPOINT = "checkpoint.safetensors"
# the files of a run that a report reads besides its result
FILES = ("config.json", "metrics.jsonl", HEALTH, MAPS)
# the entry of a record that contains the digest of all other entries
SEAL = "digest"


def digests(folder: Path) -> dict[str, str | None]:
    """Return the SHA-256 of each file that belongs to a finished run, None for a file that does not exist."""
    return {name: _digest(folder / name) for name in (*FILES, CHECKPOINT)}


def damage(folder: Path, written: dict[str, str | None] | None, *, checkpoint: bool = False) -> list[str]:
    """Return a phrase for each file that is no longer what the finished run wrote: its name and what happened to it.

    The list is empty for a result without digests. The last checkpoint is large, no report reads it, and users may
    delete it to save space, so it is checked only with `checkpoint`.
    """
    if written is None:
        return []
    problems = [
        f"{name} {_what_happened(expected, current)}"
        for name, expected in written.items()
        if name in FILES and (current := _digest(folder / name)) != expected
    ]
    if checkpoint and CHECKPOINT in written:
        expected, current = written[CHECKPOINT], _digest(folder / CHECKPOINT)
        problems += [f"{CHECKPOINT} {_what_happened(expected, current)}"] if current not in (None, expected) else []
    return problems


def sealed(record: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON record with the digest of all its other entries added."""
    content = finite({name: value for name, value in record.items() if name != SEAL})
    return {**content, SEAL: digest_of(content)}


def broken_seal(record: dict[str, Any], *, required: bool) -> str:
    """Return what is wrong with a record's own digest, or ""; without `required`, it may have none."""
    if record.get(SEAL) is None:
        return "carries no digest" if required else ""
    content = {name: value for name, value in record.items() if name != SEAL}
    return "" if digest_of(content) == record[SEAL] else "is not what the run wrote"


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a JSON value, whatever its layout in the file."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str | None:
    try:
        state = path.stat()
        return _cached_digest(path, state.st_ino, state.st_size, state.st_mtime_ns)
    except FileNotFoundError:
        return None


@lru_cache(maxsize=4096)
def _cached_digest(path: Path, *stamp: int) -> str:
    # a study reads the same files several times, and checkpoints are large
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _what_happened(expected: str | None, current: str | None) -> str:
    if current is None:
        return "is gone"
    return "came after the run had finished" if expected is None else "is not what the run wrote"
