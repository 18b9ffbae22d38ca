"""Where the source of a task lies, from its place: `file.py:Class` or `package.module:Class`."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def source_file(place: str) -> Path | None:
    """Return the file whose text is part of a task's identity; None for the package's own, known by name and
    version."""
    where, _, _ = place.rpartition(":")
    if where.endswith(".py"):
        return Path(where)
    if where.partition(".")[0] == "headwise":
        return None
    found = importlib.util.find_spec(where)
    return Path(found.origin) if found and found.origin else None
