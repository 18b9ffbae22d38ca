"""Signs of life of runs on other machines: the worker touches a file as long as it lives, whoever waits for it looks at
the file."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

# seconds between two signs of life
BEAT = 5.0


@contextlib.contextmanager
def beating(path: Path) -> Iterator[None]:
    """Touch a file now and then while the block lasts, then delete it."""
    ended = threading.Event()
    thread = threading.Thread(target=_beat, args=(path, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(OSError):
            path.unlink()


class Heartbeat:
    """Tell whether the worker of a run began, and for how long it has been silent."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(exist_ok=True)
        # what an earlier worker left says nothing of this one
        path.unlink(missing_ok=True)
        self._last: int | None = None
        self._heard = time.monotonic()

    @property
    def began(self) -> bool:
        """Whether there was a sign of life."""
        return self._last is not None

    def silence(self) -> float:
        """Return the seconds since the last sign of life, or since the beginning: by this machine's clock alone, for
        others' may differ."""
        try:
            found = self._path.stat().st_mtime_ns
        except OSError:
            found = None
        if found is not None and found != self._last:
            self._last, self._heard = found, time.monotonic()
        return time.monotonic() - self._heard

    def restart(self) -> None:
        """Count the silence from now."""
        self._heard = time.monotonic()


def _beat(path: Path, ended: threading.Event) -> None:
    while True:
        # a file system that is away for a moment is no reason to end a run
        with contextlib.suppress(OSError):
            path.touch()
        if ended.wait(BEAT):
            return
