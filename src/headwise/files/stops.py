"""How a command hears Ctrl-C and SIGTERM, which schedulers send: one line, and the exit code that a shell gives for the
signal."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM)
# by which a parent ends one worker; where there is no such signal, the worker is killed
END = getattr(signal, "SIGUSR1", signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """Say that a signal asked this process to stop."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.code = 128 + number


def stop_code(stop: KeyboardInterrupt) -> int:
    """Return the exit code of a stop: 130 after Ctrl-C, 143 after SIGTERM."""
    return stop.code if isinstance(stop, Stopped) else 128 + signal.SIGINT


def stopped_line(folder: Path | None) -> str:
    """Return the one line that a stopped study prints."""
    place = f" from {folder}" if folder else ""
    return f"\nstopped; nothing is lost. The same command goes on{place}"


def end_on_stops() -> None:
    """End at once with one line when a stop is heard, where nothing needs to be put away: while libraries are imported,
    above all."""
    for number in _heard():
        signal.signal(number, _end)


@contextmanager
def raise_on_stops() -> Iterator[None]:
    """Raise Stopped when a stop is heard; further ones are ignored, so that what is under way can be put away."""
    before = {number: signal.signal(number, _raise) for number in _heard()}
    try:
        yield
    except Stopped:
        # the process is about to end: its handlers stay as `_raise` left them
        before = {}
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ignored_stops() -> Iterator[None]:
    """Ignore stops for the moment in which processes are started: they inherit it, and their parent decides for
    them."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _heard()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_stops_to_the_parent() -> None:
    """Do nothing at a stop, which reaches a whole terminal or job; what this process starts itself hears it as
    usual."""
    for number in STOPS:
        signal.signal(number, lambda *_: None)


def end_in_order() -> None:
    """End this process when its parent asks for it, as at the end of its program: libraries free what they hold,
    semaphores above all."""
    signal.signal(END, lambda *_: sys.exit())


def _heard() -> list[signal.Signals]:
    """Return the stops that are not ignored: a shell ignores Ctrl-C for what it runs in the background. Only a main
    thread hears any."""
    import threading

    if threading.current_thread() is not threading.main_thread():
        return []
    # None is a handler that another language installed
    return [number for number in STOPS if signal.getsignal(number) not in (signal.SIG_IGN, None)]


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, f"{stopped_line(None)}\n".encode())
    os._exit(128 + number)


def _raise(number: int, frame: FrameType | None) -> None:
    for other in STOPS:
        signal.signal(other, signal.SIG_IGN)
    raise Stopped(number)
