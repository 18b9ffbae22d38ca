"""A worker process: it receives orders, carries them out and sends events. It imports torch with the first order."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, TextIO

from headwise.lab.files.stops import end_in_order, leave_stops_to_the_parent

if TYPE_CHECKING:
    from headwise.lab.training.job import Order


# bytes that a pipe holds
AT_ONCE = 65536
# escape sequences, which colour text and move the cursor
ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


class WorkerOutput:
    """The lines that one worker prints; `reader` is the end of a pipe that receives both of its streams."""

    def __init__(self, reader: Connection) -> None:
        self.reader = reader
        # whether the pipe is closed at the other end
        self.ended = False
        self._rest = b""

    def lines(self, *, last: bool = False) -> list[str]:
        """Return the visible, non-empty lines since the last call; `last` adds an unfinished line."""
        if not self.ended and self.reader.poll():
            content = os.read(self.reader.fileno(), AT_ONCE)
            self.ended = not content
            self._rest += content
        *complete, self._rest = self._rest.split(b"\n")
        if last or self.ended:
            complete, self._rest = [*complete, self._rest], b""
        visible = (_as_shown(line.decode(errors="replace")) for line in complete)
        return [line for line in visible if line]


def print_into(writer: Connection) -> None:
    """Send the output of this process and its children, C libraries included, into a pipe."""
    for descriptor in (1, 2):
        os.dup2(writer.fileno(), descriptor)
    writer.close()
    # new streams: those of a file buffer lines and seek, which a pipe cannot
    sys.stdout, sys.stderr = (_lines_to(descriptor) for descriptor in (1, 2))


def _lines_to(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _as_shown(line: str) -> str:
    """Return the visible part of a line that a progress bar has overwritten."""
    return ESCAPES.sub("", line.rstrip("\r").rpartition("\r")[2]).rstrip()


def serve(pipe: Connection, output: Connection, trains: bool = True) -> None:
    """Carry out orders until the pipe closes, printing into `output`; exit when the parent process is gone.

    A worker that `trains` imports torch in advance; one that only starts scripts does not need it.
    """
    leave_stops_to_the_parent()
    end_in_order()
    print_into(output)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if trains:
        # importing takes seconds; the parent reads its command meanwhile
        from headwise.lab.training import execution as run  # noqa: F401

    while True:
        try:
            order, device = pipe.recv()
        except EOFError:
            return
        pipe.send(carry_out(dataclasses.replace(order, device=device), pipe.send))


def carry_out(order: Order, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Carry out one order and return its last event: done with the result, or failed with the reason."""
    from headwise_verdict import StudyError
    from headwise_verdict.files import explain

    try:
        return {"event": "done", "result": _result(order, tell)}
    except StudyError as error:
        return {"event": "failed", "reason": str(error), "trace": error.trace, "printed": error.printed}
    except OSError as error:
        return {"event": "failed", "reason": str(explain(error, order.folder)), "trace": "", "fatal": True}
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return {"event": "failed", "reason": reason, "trace": traceback.format_exc()}


def _result(order: Order, tell: Callable[[dict[str, Any]], None]) -> Any:
    from headwise.lab.training.job import Rehearsal, ScriptOrder

    if isinstance(order, ScriptOrder):
        from headwise.lab.training.script_process import carry_script, try_script

        return try_script(order, tell) if order.tries else carry_script(order, tell)
    # these import torch
    if isinstance(order, Rehearsal):
        from headwise.lab.training.rehearsal import rehearse_arms

        return rehearse_arms(order)
    from headwise.lab.training.execution import execute

    return execute(order, tell)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
