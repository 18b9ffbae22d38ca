"""One process of several that share each run (`--processes`, torchrun, `accelerate launch`): how it stops and how it
ends.

Light to import: it must hear a stop before torch is imported, which takes seconds.
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

# the shell's code for a process that was stopped by Ctrl-C
STOPPED = 130
# seconds between two looks for the process that launched this one
GLANCE = 1.0
# seconds; when all are stopped, a neighbour's connection may break before the own signal arrives
MOMENT = 0.5
# prctl: the signal that this process gets when its parent ends
PR_SET_PDEATHSIG = 1
SHOW_CURSOR = "\x1b[?25h"

_folder: list[Path] = []


def is_one_of_several() -> bool:
    """Return whether this process was launched as one of several that train together."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def be_one_of_several(work: Callable[[], object]) -> NoReturn:
    """Do the work of one process of several and end it for good, on success, on a stop and on errors.

    torch leaves threads behind (process group, profiler) whose destructors abort the process now and then when the
    interpreter takes them down. Python's own exit handlers run; the libraries' destructors do not.
    """
    for name, value in worker_environment(1).items():
        os.environ.setdefault(name, value)
    hear_stops()
    code = _code_of(work)
    if code == 0:
        _leave_process_group()
    # what a task or a library registered still runs: `os._exit` leaves it out
    atexit._run_exitfuncs()
    _end(code)


def name_folder(folder: Path) -> None:
    """Tell from which folder the same command goes on, for the line that a stop prints."""
    _folder[:] = [folder]


def hear_stops() -> None:
    """End this process at Ctrl-C, at SIGTERM and when the process that launched it is gone, whatever it waits for.

    A collective waits in C++ for its neighbours, where Python's handlers do not run: a thread of its own hears the
    signal through a pipe that the C handler writes to. To end at once is safe: a run can be left at any moment.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in STOPS:
        # ignored where the launcher, or a shell in the background, decides
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
    """Let Linux end this process with the one that launched it, even while C code holds every thread of Python."""
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _launcher_is_gone() -> bool:
    """Return whether torchrun ended while this process was starting: the store that its agent serves then refuses
    connections."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    address = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0"))
    try:
        socket.create_connection(address, timeout=GLANCE).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        # an answer that is late says nothing
        return False
    return False


def _listen(reading: int, launcher: int | None) -> None:
    while os.getppid() == launcher:
        if not select.select([reading], [], [], GLANCE)[0]:
            continue
        numbers = os.read(reading, 64)
        if signal.SIGINT in numbers or signal.SIGTERM in numbers:
            _say_stopped()
            os._exit(STOPPED if signal.SIGINT in numbers else 128 + signal.SIGTERM)
    os._exit(1)


def _say_stopped() -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    # past rich, which holds sys.stderr while it draws, and past buffers that the main thread may hold
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
    """Return a stop that reached a neighbour first the time to reach this process, before an error is told."""
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
            # nobody reads any more: what was done is on disk
            code = code or 1
    os._exit(code)
