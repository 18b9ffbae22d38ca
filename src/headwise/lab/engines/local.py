"""The engines on this machine: worker processes that carry out one run at a time each, or this process alone."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from headwise.lab.engines.worker import WorkerOutput, carry_out, serve
from headwise.lab.files.stops import END, ignored_stops
from headwise.lab.training.job import Order
from headwise_verdict import StudyError

# how often a worker killed from outside (out of memory, for example) is replaced before the study stops
REPLACEMENTS = 2
# seconds for workers to end on their own before they are killed
PATIENCE = 10.0


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    output: WorkerOutput
    order: Order | None = None


class LocalEngine:
    """An engine with `jobs` worker processes; their number changes no result."""

    rehearses = True

    def __init__(self, jobs: int, *, trains: bool = True) -> None:
        self.parallel = jobs > 1
        self._trains = trains
        self._waiting: deque[Order] = deque()
        self._deaths: dict[str, int] = {}
        # printed lines, each with the run that printed it first
        self._printed: dict[str, str] = {}
        self._workers = [self._start(number) for number in range(jobs)]

    def submit(self, order: Order) -> None:
        """Queue one run."""
        self._waiting.append(order)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield events until no run is waiting or running; orders may be submitted meanwhile."""
        self._hand_out()
        while any(worker.order for worker in self._workers):
            yield from self._receive()
            self._hand_out()

    def close(self) -> None:
        """End the workers; their unfinished runs continue from their last checkpoints."""
        for worker in self._workers:
            # close the reader first, so that a printing worker does not block
            worker.output.reader.close()
            if worker.order is None:
                worker.pipe.close()
            elif worker.process.is_alive():
                assert worker.process.pid is not None
                os.kill(worker.process.pid, END)
        until = time.monotonic() + PATIENCE
        for worker in self._workers:
            worker.process.join(max(0.0, until - time.monotonic()))
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()

    def _start(self, number: int) -> _Worker:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        reader, writer = context.Pipe(duplex=False)
        name = f"headwise worker {number}"
        process = context.Process(target=serve, args=(theirs, writer, self._trains), name=name, daemon=True)
        with _environment(worker_environment(1)), ignored_stops():
            process.start()
        theirs.close()
        writer.close()
        return _Worker(process, mine, WorkerOutput(reader))

    def _hand_out(self) -> None:
        for number, worker in enumerate(self._workers):
            if worker.order is None and self._waiting:
                worker.order = self._waiting.popleft()
                try:
                    worker.pipe.send((worker.order, _device_of(worker.order.device, number)))
                except OSError:
                    # the worker has ended: its sentinel is ready, and `_receive` replaces it
                    continue

    def _receive(self) -> Iterator[dict[str, Any]]:
        """Wait for an event and yield what the workers sent; replace workers that ended."""
        printing = [worker.output for worker in self._workers if worker.order is not None]
        readers = [output.reader for output in printing if not output.ended]
        wait([*readers, *(item for worker in self._workers for item in (worker.pipe, worker.process.sentinel))])
        for number, worker in enumerate(self._workers):
            alive = worker.process.is_alive()
            # yield what an ended worker sent before replacing it
            yield from self._read(worker)
            yield from self._output(worker, last=not alive)
            if not alive:
                yield from self._replace(number)

    def _read(self, worker: _Worker) -> Iterator[dict[str, Any]]:
        try:
            while worker.pipe.poll():
                event = worker.pipe.recv()
                assert worker.order is not None
                event["run"] = worker.order.identity
                ends = event["event"] in ("done", "failed")
                # these lines were printed before the event
                yield from self._output(worker, last=ends)
                if ends:
                    worker.order = None
                yield event
        except (EOFError, OSError):
            # the worker ended, perhaps in the middle of a message: its sentinel is ready
            return

    def _output(self, worker: _Worker, *, last: bool) -> Iterator[dict[str, Any]]:
        """Yield the lines that a worker printed, each only once: all models print the same while loading."""
        if worker.order is None:
            # lines printed before the first order are yielded with it
            return
        run = worker.order.identity
        for line in worker.output.lines(last=last):
            if self._printed.setdefault(line, run) == run:
                yield {"event": "output", "run": run, "text": line}

    def _replace(self, number: int) -> Iterator[dict[str, Any]]:
        worker = self._workers[number]
        worker.process.join()
        worker.pipe.close()
        worker.output.reader.close()
        code, order = worker.process.exitcode, worker.order
        self._workers[number] = self._start(number)
        if order is None:
            return
        self._deaths[order.identity] = self._deaths.get(order.identity, 0) + 1
        if self._deaths[order.identity] > REPLACEMENTS:
            raise StudyError(
                f"the worker of {order.configuration.arm}, seed {order.configuration.seed}, ended with exit code "
                f"{code} {REPLACEMENTS + 1} times (-9 often means: out of memory). Use fewer --jobs, then "
                "start the same command again: finished runs and checkpoints are kept."
            )
        self._waiting.appendleft(order)
        yield {
            "event": "note",
            "run": order.identity,
            "text": f"a worker ended with exit code {code}; its run resumes from its last checkpoint",
        }


def _device_of(device: str, number: int) -> str:
    """Return the device of a worker; workers are spread over the GPUs of this machine."""
    if device != "cuda":
        return device
    import torch

    return f"cuda:{number % torch.cuda.device_count()}"


def worker_environment(threads: int) -> dict[str, str]:
    """Return the variables that a worker needs before it imports torch."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # the memory measurement starts torch's profiler, which otherwise writes to the terminal
        "KINETO_LOG_LEVEL": "99",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # hide the progress bars of transformers and its hub, one for each model of each run, unless the user set
        # otherwise
        "HF_HUB_DISABLE_PROGRESS_BARS": os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
    }


@contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


class HereEngine:
    """An engine in this process; every process of a distributed launch carries out the same runs in the same order."""

    parallel = False
    rehearses = True

    def __init__(self) -> None:
        self._waiting: deque[Order] = deque()

    def submit(self, order: Order) -> None:
        """Queue one run."""
        self._waiting.append(order)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield events until no run is waiting."""
        while self._waiting:
            order = self._waiting.popleft()
            events: list[dict[str, Any]] = []
            last = carry_out(order, events.append)
            notes = [event for event in events if event["event"] == "note"]
            yield from ({**event, "run": order.identity} for event in (*notes, last))

    def close(self) -> None:
        """Drop the runs that have not started."""
        self._waiting.clear()
