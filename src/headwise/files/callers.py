"""The functions that are running in this thread: their frames hold what libraries do not pass on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any


def callers() -> Iterator[FrameType]:
    """Yield the frames of the functions that are running in this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def caller_of(callback: Any, kind: type) -> Any:
    """Return the innermost caller that is a method of an instance of `kind`, but not of `callback`; None without one.

    A Trainer passes neither itself nor the other callbacks to a callback.
    """
    objects = (frame.f_locals.get("self") for frame in callers())
    return next((found for found in objects if isinstance(found, kind) and found is not callback), None)
