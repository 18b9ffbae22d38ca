"""Several processes that share each run (`--processes`, torchrun, `accelerate launch`): their start, stop and end.

It does not import torch, which takes seconds, so that a process can handle a stop before.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from headwise.lab.engines.local import worker_environment
from headwise.lab.files.stops import STOPS, ignored_stops, raise_on_stops, stop_code, stopped_line
from headwise_verdict.files import is_for_users

# the shell's exit code of a process stopped by Ctrl-C
STOPPED = 130
# seconds between two checks that the launcher still runs
GLANCE = 1.0
# seconds to wait for a stop signal: when all processes are stopped, the connection to another may break first
MOMENT = 0.5
# option of prctl: the signal sent to this process when its parent ends
PR_SET_PDEATHSIG = 1
SHOW_CURSOR = "\x1b[?25h"

_folder: list[Path] = []


def is_one_of_several() -> bool:
    """Return whether this process was launched as one of several that train together."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def be_one_of_several(work: Callable[[], object]) -> NoReturn:
    """Run the work of one process of several and exit, on success, on a stop and on errors.

    torch leaves threads behind (process group, profiler) whose destructors sometimes abort the process when the
    interpreter exits. Python's own exit handlers run; the libraries' destructors do not.
    """
    for name, value in worker_environment(1).items():
        os.environ.setdefault(name, value)
    hear_stops()
    code = _code_of(work)
    if code == 0:
        _leave_process_group()
    # run the exit handlers of tasks and libraries, which `os._exit` skips
    atexit._run_exitfuncs()
    _end(code)


def name_folder(folder: Path) -> None:
    """Set the folder of the study, for the line printed at a stop."""
    _folder[:] = [folder]


def hear_stops() -> None:
    """Exit on Ctrl-C, on SIGTERM and when the launcher is gone, whatever this process waits for.

    A collective waits for other processes in C++, where Python's handlers do not run; a thread therefore receives the
    signal through a pipe that the C handler writes to. Exiting at once is safe, because a run can be stopped at any
    moment.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in STOPS:
        # keep signals ignored if the launcher, or a shell in the background, handles them
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    known = multiprocessing.parent_process()
    launcher = os.getppid() if known is None else known.pid
    _end_with_launcher()
    if _launcher_is_gone():
        os._exit(1)
    threading.Thread(target=_listen, args=(reading, launcher), daemon=True, name="headwise stop").start()


def _end_with_launcher() -> None:
    """Make Linux kill this process with its launcher, even while C code holds every Python thread."""
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _launcher_is_gone() -> bool:
    """Return whether torchrun ended while this process was starting: its agent's store then refuses connections."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    address = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0"))
    try:
        socket.create_connection(address, timeout=GLANCE).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        # a timeout does not show that the launcher is gone
        return False
    return False


def _listen(reading: int, launcher: int | None) -> None:
    while os.getppid() == launcher:
        if not select.select([reading], [], [], GLANCE)[0]:
            continue
        numbers = os.read(reading, 64)
        if signal.SIGINT in numbers or signal.SIGTERM in numbers:
            _print_stopped()
            os._exit(STOPPED if signal.SIGINT in numbers else 128 + signal.SIGTERM)
    os._exit(1)


def _print_stopped() -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    # bypass rich, which replaces sys.stderr while it draws, and buffers that the main thread may hold
    if os.isatty(2):
        os.write(2, SHOW_CURSOR.encode())
    os.write(2, f"{stopped_line(_folder[0] if _folder else None)}\n".encode())


def _code_of(work: Callable[[], object]) -> int:
    try:
        work()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except KeyboardInterrupt:
        return STOPPED
    except BaseException as error:
        if is_for_users(error):
            number = os.environ.get("RANK", "0")
            print(f"error: {error}" if number == "0" else f"error in process {number}: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        return 1
    return 0


def wait_for_stop() -> None:
    """Wait a moment before reporting an error, which may be caused by a stop of the other processes."""
    time.sleep(MOMENT)


def _leave_process_group() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _end(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # the output is not read any more; all results are on disk
            code = code or 1
    os._exit(code)


# seconds for the processes to end on their own before they are killed
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
            _terminate(started)
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
    be_one_of_several(work)


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


def _terminate(started: list[BaseProcess]) -> None:
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
