"""Text that takes seconds to make, kept in the user's cache for later processes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from headwise_verdict.files.durable import write_bytes


def data_folder(given: Path | None) -> Path:
    """Return the folder of data sets: `given`, or the one in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return given or Path(cache) / "headwise"


def cached_text(name: str, make: Callable[[], str]) -> str:
    """Return the text that `make` returns, from the file `name` of the user's cache if it is there and undamaged.

    Where nothing can be written, nothing is kept.
    """
    # RuntimeError: there is no home directory
    with suppress(OSError, RuntimeError):
        digest, _, content = (data_folder(None) / name).read_bytes().partition(b"\n")
        if hashlib.sha256(content).hexdigest().encode() == digest:
            return content.decode()
    text = make()
    content = text.encode()
    with suppress(OSError, RuntimeError):
        folder = data_folder(None)
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / name, hashlib.sha256(content).hexdigest().encode() + b"\n" + content, flush=False)
    return text
