"""One of several processes that share each run (`--processes`, torchrun, `accelerate launch`): how it stops and ends.

It does not import torch, which takes seconds, so that it can handle a stop before.
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
from pathlib import Path
from typing import NoReturn

from headwise.engines.local import worker_environment
from headwise.files.errors import is_for_users
from headwise.files.stops import STOPS, stopped_line

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
            # nobody reads the output any more; all results are on disk
            code = code or 1
    os._exit(code)
