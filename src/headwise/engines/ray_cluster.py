"""A Ray cluster: one task a run; a run whose node dies is carried on by another node from its last checkpoint.

The folder of the study must be on a file system that all nodes share.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

from headwise.engines.local import REPLACEMENTS, worker_environment
from headwise.engines.metric_streams import MetricStreams
from headwise.engines.worker import carry_out
from headwise.files.errors import StudyError
from headwise.training.job import Order

# seconds between two looks at the metric streams of the running runs
GLANCE = 1.0
# seconds to wait for an address to answer
PATIENCE = 5.0


def carry_out_remotely(order: Order, folder: str) -> list[dict[str, Any]]:
    """Carry out one order on a node of the cluster: its notes, then its last event."""
    if not order.folder.parent.parent.is_dir():
        reason = f"{order.folder.parent.parent} is not there on this node. Ray needs --out on a file system that all nodes share"
        return [{"event": "failed", "reason": reason, "trace": ""}]
    # before torch is imported, which comes with the first run of this process
    os.environ.update(worker_environment(order.configuration.threads))
    # a task may name its files relative to where the command was started
    os.chdir(folder)
    told: list[dict[str, Any]] = []
    last = carry_out(order, told.append)
    return [*(event for event in told if event["event"] == "note"), last]


class RayEngine:
    """Carry out orders on a Ray cluster; results are those of the local engine."""

    parallel = True
    rehearses = True

    def __init__(self, address: str | None) -> None:
        try:
            import ray
        except ModuleNotFoundError as error:
            raise StudyError("--engine ray needs Ray, which is not installed: pip install 'headwise[ray]'.") from error
        self._ray = ray
        self._connect(address)
        self._running: dict[Any, Order] = {}
        self._streams = MetricStreams()

    def submit(self, order: Order) -> None:
        """Send one run to the cluster: as many cores as threads, and a GPU where the study uses one."""
        gpus = 1 if order.device.startswith("cuda") else 0
        threads = order.configuration.threads
        task = self._ray.remote(carry_out_remotely).options(
            num_cpus=threads,
            num_gpus=gpus,
            max_retries=REPLACEMENTS,
        )
        self._running[task.remote(order, os.getcwd())] = order

    def events(self) -> Iterator[dict[str, Any]]:
        """Return events until no run is waiting or running; progress is read from the metric streams."""
        while self._running:
            ready, _ = self._ray.wait(list(self._running), timeout=GLANCE)
            for reference in ready:
                order = self._running.pop(reference)
                yield from ({**event, "run": order.identity} for event in self._collect(reference))
            for order in list(self._running.values()):
                yield from self._streams.progress(order)

    def close(self) -> None:
        """Cancel what runs and leave the cluster."""
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._ray.shutdown()

    def _connect(self, address: str | None) -> None:
        if address is not None:
            _refuse_silence(address)
        try:
            self._ray.init(address=address or "auto", log_to_driver=False)
        except ConnectionError:
            if address is not None:
                raise
            # no cluster runs: Ray makes one of this machine
            self._ray.init(include_dashboard=False, log_to_driver=False)

    def _collect(self, reference: Any) -> list[dict[str, Any]]:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            reason = f"Ray gave the run up after {REPLACEMENTS} retries: {type(error).__name__}: {error}"
            return [{"event": "failed", "reason": reason, "trace": ""}]


def _refuse_silence(address: str) -> None:
    """Refuse an address where nothing listens, for which Ray itself waits minutes."""
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
