"""The Ray engine: one task a run; if a worker or node dies, another continues the run from its last checkpoint.

The folder of the study must be on a file system that all nodes share. Ray itself reports most deaths, but a task may
also wait for a worker that never comes (ray-project/ray issues 59342 and 63405). Runs therefore touch a file in `.ray`
of the study's folder, and a run whose file is not touched for too long is started again.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.lab.engines.local import REPLACEMENTS
from headwise.lab.engines.remote_runs import Heartbeat, MetricStreams, beating, carried_out_elsewhere
from headwise.lab.training.job import Order
from headwise_verdict import StudyError

# seconds between two reads of the metric streams
GLANCE = 1.0
# seconds to wait for an address to answer
PATIENCE = 5.0
# seconds without a heartbeat after which a run is started again, also one that has not started although there is room
# for it
SILENCE = 120.0
# seconds for a finished result to arrive, and for leaving the cluster
LONGEST_FAREWELL = 30.0


def carry_out_remotely(order: Order, folder: str) -> list[dict[str, Any]]:
    """Carry out one order on a node of the cluster; return its notes and its last event."""
    return carried_out_elsewhere(order, folder, "Ray", beating(_heartbeat_path(order)))


@dataclass
class _RayRun:
    order: Order
    heartbeat: Heartbeat


class RayEngine:
    """An engine that carries out orders on a Ray cluster; its results equal those of the local engine."""

    parallel = True
    rehearses = True

    def __init__(self, address: str | None) -> None:
        try:
            import ray
        except ModuleNotFoundError as error:
            raise StudyError("--engine ray needs Ray, which is not installed: pip install 'headwise[ray]'.") from error
        self._ray = ray
        self._connect(address)
        self._running: dict[Any, _RayRun] = {}
        self._losses: Counter[str] = Counter()
        self._streams = MetricStreams()
        self._heartbeats: set[Path] = set()

    def submit(self, order: Order) -> None:
        """Send one run to the cluster: as many cores as threads, and a GPU if the study uses one."""
        path = _heartbeat_path(order)
        self._heartbeats.add(path)
        task = self._ray.remote(carry_out_remotely).options(
            num_cpus=order.configuration.threads,
            num_gpus=int(_uses_gpu(order)),
            # this engine resubmits lost runs itself, to report each loss
            max_retries=0,
        )
        heartbeat = Heartbeat(path)
        self._running[task.remote(order, os.getcwd())] = _RayRun(order, heartbeat)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield events until no run is waiting or running; progress is read from the metric streams."""
        while self._running:
            ready, _ = self._ray.wait(list(self._running), timeout=GLANCE)
            for reference in ready:
                order = self._running.pop(reference).order
                yield from ({**event, "run": order.identity} for event in self._collect(reference, order))
            for reference, running in list(self._running.items()):
                order = running.order
                yield from self._streams.progress(order)
                if reason := self._why_lost(running):
                    del self._running[reference]
                    self._ray.cancel(reference, force=True)
                    yield {**self._resubmit(order, reason), "run": order.identity}

    def close(self) -> None:
        """Cancel the running runs and leave the cluster."""
        thread = threading.Thread(target=self._leave, daemon=True)
        thread.start()
        thread.join(LONGEST_FAREWELL)
        if thread.is_alive():
            # Ray would wait for it again at the end of the process, without a limit
            atexit.unregister(self._ray.shutdown)
        for path in self._heartbeats:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                # fails while other heartbeats are there
                path.parent.rmdir()

    def _leave(self) -> None:
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._ray.shutdown()

    def _connect(self, address: str | None) -> None:
        if address is not None:
            _check_address(address)
        try:
            self._ray.init(address=address or "auto", log_to_driver=False)
        except ConnectionError:
            if address is not None:
                raise
            # no cluster runs: Ray starts one on this machine
            self._ray.init(include_dashboard=False, log_to_driver=False)

    def _collect(self, reference: Any, order: Order) -> list[dict[str, Any]]:
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference, timeout=LONGEST_FAREWELL)
        except errors.RayTaskError as error:
            return [{"event": "failed", "reason": f"its task on the Ray cluster failed: {error}", "trace": ""}]
        except errors.RayError as error:
            # keep the first line; the others are advice about Ray's dashboard
            message = str(error).strip().partition("\n")[0]
            return [self._resubmit(order, f"{type(error).__name__}: {message}")]

    def _why_lost(self, running: _RayRun) -> str | None:
        """Return why a run counts as lost, or None; a run that waits for its turn on a busy cluster does not."""
        heartbeat = running.heartbeat
        if heartbeat.silence() < SILENCE:
            return None
        if heartbeat.began:
            return f"no sign of life from its worker for {SILENCE:.0f} s"
        if self._has_room(running.order):
            return f"not begun within {SILENCE:.0f} s although the cluster has room for it"
        heartbeat.restart()
        return None

    def _has_room(self, order: Order) -> bool:
        """Return whether some node certainly has room for a run; Ray reports only the cluster's total."""
        if _uses_gpu(order):
            # a node with a free GPU may lack free cores
            return False
        nodes = sum(node["Alive"] for node in self._ray.nodes())
        # with fewer free cores, each node might have too few of them
        return self._ray.available_resources().get("CPU", 0) > nodes * (order.configuration.threads - 1)

    def _resubmit(self, order: Order, why: str) -> dict[str, Any]:
        """Submit a lost run again, or give it up after too many losses; return the event that reports it."""
        self._losses[order.identity] += 1
        if self._losses[order.identity] > REPLACEMENTS:
            reason = (
                f"the Ray cluster lost it {REPLACEMENTS + 1} times, the last time: {why}. `ray status` shows the "
                "nodes, and session_latest/logs in Ray's folder on a node what happened there"
            )
            return {"event": "failed", "reason": reason, "trace": ""}
        self.submit(order)
        title = f"{order.configuration.arm}, seed {order.configuration.seed}"
        return {"event": "note", "text": f"{title}: {why}; it resumes from its last checkpoint"}


def _heartbeat_path(order: Order) -> Path:
    return order.folder.parent.parent / ".ray" / order.identity


def _uses_gpu(order: Order) -> bool:
    return order.device.startswith("cuda")


def _check_address(address: str) -> None:
    """Raise StudyError for an address at which nothing listens, for which Ray itself would wait minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()
    except OSError as error:
        raise StudyError(
            f"--ray-address {address}: no Ray cluster answers there ({error}). "
            "Start one with `ray start --head`, which prints its address."
        ) from error
