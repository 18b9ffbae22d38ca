"""Handling of Ctrl-C and of SIGTERM, which schedulers send: one line, and the signal's usual exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM)
# the signal by which a parent ends one worker; without SIGUSR1, SIGTERM kills the worker
END = getattr(signal, "SIGUSR1", signal.SIGTERM)
# seconds until a signal that came during an import is sent again
AGAIN = 0.05


class Stopped(KeyboardInterrupt):
    """A signal asked this process to stop."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.code = 128 + number


def stop_code(stop: KeyboardInterrupt) -> int:
    """Return the exit code of a stop: 130 after Ctrl-C, 143 after SIGTERM."""
    return stop.code if isinstance(stop, Stopped) else 128 + signal.SIGINT


def stopped_line(folder: Path | None) -> str:
    """Return the one line that a stopped study prints."""
    place = f" from {folder}" if folder else ""
    return f"\nstopped; nothing is lost. The same command resumes{place}"


def end_on_stops() -> None:
    """End at once with one line on a stop; for times without anything to clean up, above all while importing."""
    for number in _handled_stops():
        signal.signal(number, _end)


@contextmanager
def raise_on_stops() -> Iterator[None]:
    """Raise Stopped on a stop, and ignore further ones, so that running work can be cleaned up."""
    before = {number: signal.signal(number, _raise) for number in _handled_stops()}
    try:
        yield
    except Stopped:
        # the process is about to end: the handlers set by `_raise` stay
        before = {}
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ignored_stops() -> Iterator[None]:
    """Ignore stops while processes are started: they inherit this, and their parent stops them."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _handled_stops()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_stops_to_the_parent() -> None:
    """Do nothing on a stop, which is sent to a whole terminal or job; processes started here handle it as usual."""
    for number in STOPS:
        signal.signal(number, lambda *_: None)


def end_in_order() -> None:
    """Exit normally on the parent's signal, so that libraries free their resources, above all semaphores."""
    signal.signal(END, _exit)


def _handled_stops() -> list[signal.Signals]:
    """Return the stops that are not ignored; none outside the main thread.

    A shell ignores Ctrl-C for processes in the background.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    # None means a handler that was not installed from Python
    return [number for number in STOPS if signal.getsignal(number) not in (signal.SIG_IGN, None)]


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, f"{stopped_line(None)}\n".encode())
    os._exit(128 + number)


def _exit(number: int, frame: FrameType | None) -> None:
    if not _comes_later(number, frame):
        sys.exit()


def _comes_later(number: int, frame: FrameType | None) -> bool:
    """Send a signal to this process again, and return True, if it came while a library was being imported.

    Libraries in C++, above all torch, abort the process if an exception is raised in their import.
    """
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("headwise"):
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            threading.Timer(AGAIN, os.kill, (os.getpid(), number)).start()
            return True
        frame = frame.f_back
    return False


def _raise(number: int, frame: FrameType | None) -> None:
    if _comes_later(number, frame):
        return
    for other in STOPS:
        signal.signal(other, signal.SIG_IGN)
    raise Stopped(number)
