"""Launch the processes of `--processes N` on this machine, as torchrun does, and end them together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from headwise.engines import rank
from headwise.engines.local import worker_environment
from headwise.files.stops import ignored_stops, raise_on_stops, stop_code

# seconds for the processes to end by themselves before they are killed
PATIENCE = 5.0
TERMINATED = 128 + signal.SIGTERM


def launch(processes: int, work: Callable[[], object], line: str) -> int:
    """Run `work`, which must be picklable, in processes that train together; return the exit code.

    If one fails, the others are ended, because they would wait for it. Ctrl-C gives 130, SIGTERM 143, and both print
    `line`.
    """
    started: list[BaseProcess] = []
    try:
        with raise_on_stops():
            with ignored_stops():
                started += _start(processes, work)
            return _watch(started)
    except KeyboardInterrupt as stop:
        with ignored_stops():
            _end(started)
            if not started or started[0].exitcode != TERMINATED:
                # the first process had not yet installed its handler, which prints it
                print(line, file=sys.stderr)
        return stop_code(stop)
    finally:
        _kill(started)


def serve(work: Callable[[], object], environment: dict[str, str]) -> None:
    """Run one of the processes; it ignores Ctrl-C, which the launcher handles for all of them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(environment)
    rank.be_one_of_several(work)


def _start(processes: int, work: Callable[[], object]) -> list[BaseProcess]:
    context = multiprocessing.get_context("spawn")
    shared = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    started: list[BaseProcess] = []
    for number in range(processes):
        own = {"RANK": str(number), "LOCAL_RANK": str(number)}
        environment = worker_environment(1) | shared | own
        process = context.Process(target=serve, args=(work, environment), name=f"headwise rank {number}", daemon=True)
        process.start()
        started.append(process)
    return started


def _watch(started: list[BaseProcess]) -> int:
    """Wait until all processes succeeded or one failed; return the exit code."""
    running = list(started)
    while running:
        wait([process.sentinel for process in running])
        for process in [process for process in running if not process.is_alive()]:
            process.join()
            running.remove(process)
            if process.exitcode != 0:
                return _failure(process, running)
    return 0


def _failure(process: BaseProcess, others: list[BaseProcess]) -> int:
    """Wait a moment for the other processes to report, then report one that was killed; return the exit code."""
    assert process.exitcode is not None
    wait_until = time.monotonic() + PATIENCE
    for other in others:
        other.join(max(0.0, wait_until - time.monotonic()))
    if process.exitcode < 0:
        print(
            f"error: {process.name} ended with exit code {process.exitcode} (-9 often means: out of memory). "
            "Start the same command again: finished runs and checkpoints are kept.",
            file=sys.stderr,
        )
        return 1
    return process.exitcode


def _end(started: list[BaseProcess]) -> None:
    for process in started:
        process.terminate()
    wait_until = time.monotonic() + PATIENCE
    for process in started:
        process.join(max(0.0, wait_until - time.monotonic()))


def _kill(started: list[BaseProcess]) -> None:
    for process in started:
        process.kill()
        process.join()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
