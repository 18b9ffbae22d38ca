"""Runs on other machines: heartbeats and progress, read from a shared file system."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headwise.files.durable import append
from headwise.lab.engines.local import worker_environment
from headwise.lab.engines.worker import carry_out
from headwise.lab.files.script_run import read_told
from headwise.lab.training.job import Order, ScriptOrder
from headwise_verdict.files import plain_folder, read_lines
from headwise_verdict.results import EpochLine

# seconds between two heartbeats
BEAT = 5.0


def carried_out_elsewhere(
    order: Order, folder: str, engine: str, during: contextlib.AbstractContextManager[None]
) -> list[dict[str, Any]]:
    """Carry out an order on another machine; return its notes and its last event.

    Args:
        folder: of the command, which a task may use relative paths to.
        engine: as users know it.
        during: entered while the order is carried out.
    """
    study = order.folder.parent.parent
    if not study.is_dir():
        reason = f"{study} is not there on this node. {engine} needs --out on a file system that all nodes share"
        return [{"event": "failed", "reason": reason, "trace": ""}]
    # before torch is imported, which the first run of this process does
    os.environ.update(worker_environment(order.configuration.threads))
    os.chdir(folder)
    events: list[dict[str, Any]] = []
    with during:
        last = carry_out(order, events.append)
    return [*(event for event in events if event["event"] == "note"), last]


@contextlib.contextmanager
def beating(path: Path) -> Iterator[None]:
    """Append to a file every few seconds during the block, then delete it."""
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
    """The heartbeat of a run's worker: whether it started, and for how long it has been silent."""

    def __init__(self, path: Path) -> None:
        self._path = path
        plain_folder(path.parent)
        # a file left by an earlier worker says nothing about this one
        path.unlink(missing_ok=True)
        self._last: int | None = None
        self._heard = time.monotonic()

    @property
    def began(self) -> bool:
        """Return whether there was a heartbeat."""
        return self._last is not None

    def silence(self) -> float:
        """Return the seconds since the last heartbeat or the start, by this machine's clock alone."""
        try:
            modified = self._path.stat().st_mtime_ns
        except OSError:
            modified = None
        if modified is not None and modified != self._last:
            self._last, self._heard = modified, time.monotonic()
        return time.monotonic() - self._heard

    def restart(self) -> None:
        """Count the silence from now on."""
        self._heard = time.monotonic()


def _beat(path: Path, ended: threading.Event) -> None:
    while True:
        # a file system that is unavailable for a moment does not end a run
        with contextlib.suppress(OSError):
            append(path, b".")
        if ended.wait(BEAT):
            return


class MetricStreams:
    """The progress of runs, from what they wrote since the last read."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def progress(self, order: Order) -> Iterator[dict[str, Any]]:
        """Yield one progress event if the run's number of epochs has changed since the last read."""
        if isinstance(order, ScriptOrder):
            yield from self._of_script(order)
            return
        records = read_lines(order.folder / "metrics.jsonl")
        if not records or len(records) == self._seen.get(order.identity, 0):
            return
        self._seen[order.identity] = len(records)
        lines = [EpochLine.model_validate(line) for line in records]
        settings, last = order.configuration.settings, lines[-1]
        # with `steps` set, the number of epochs is not known before the end
        epochs = max(settings.get("epochs", 0), len(lines)) if settings.get("steps") is None else len(lines)
        steps = settings.get("steps") or epochs
        done = min(1.0, (len(lines) if settings.get("steps") is None else last.step or 0) / steps)
        remaining = sum(line.seconds for line in lines) * (1 - done) / max(done, 1e-9)
        name = next((key for key in last.metrics if key.startswith("train/") and key != "train/loss"), "")
        event = {"event": "progress", "run": order.identity, "epoch": len(lines), "epochs": epochs, "left": remaining}
        numbers = {"loss": _number(last.metrics.get("train/loss")), "metric": _number(last.metrics.get(name))}
        yield event | numbers | {"name": name.removeprefix("train/"), "done": done}

    def _of_script(self, order: ScriptOrder) -> Iterator[dict[str, Any]]:
        """Yield the latest point of a script if it has changed since the last read."""
        starts = order.attempts()
        points = (
            [line for line in read_told(starts[-1].with_suffix(".jsonl")) if line["told"] == "log"] if starts else []
        )
        if points and points[-1]["step"] != self._seen.get(order.identity):
            self._seen[order.identity] = points[-1]["step"]
            figures = {name: float(value) for name, value in points[-1]["figures"].items()}
            step = points[-1]["step"]
            yield {"event": "progress", "run": order.identity, "step": step, "figures": figures, "done": 0.0}


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
