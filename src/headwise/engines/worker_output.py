"""What worker processes print: caught, so that it stands in lines of its own beside the progress of a study and does
not overwrite it."""

from __future__ import annotations

import os
import re
import sys
from multiprocessing.connection import Connection
from typing import TextIO

# as much as a pipe holds
AT_ONCE = 65536
# escape sequences, which color text and move the cursor
ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


class WorkerOutput:
    """Read the lines that one worker prints; `reader` is the end of a pipe to which the worker gave both of its
    streams."""

    def __init__(self, reader: Connection) -> None:
        self.reader = reader
        # whether nothing comes any more
        self.ended = False
        self._rest = b""

    def lines(self, *, last: bool = False) -> list[str]:
        """Return the lines printed since the last call as a terminal would show them, without empty ones; `last` counts
        an unfinished line too."""
        if not self.ended and self.reader.poll():
            found = os.read(self.reader.fileno(), AT_ONCE)
            self.ended = not found
            self._rest += found
        *whole, self._rest = self._rest.split(b"\n")
        if last or self.ended:
            whole, self._rest = [*whole, self._rest], b""
        shown = (_as_shown(line.decode(errors="replace")) for line in whole)
        return [line for line in shown if line]


def print_into(writer: Connection) -> None:
    """Send all that this process and its children print, C libraries included, into a pipe."""
    for descriptor in (1, 2):
        os.dup2(writer.fileno(), descriptor)
    writer.close()
    # anew: the streams of a file buffer lines and seek, which a pipe cannot
    sys.stdout, sys.stderr = (_lines_to(descriptor) for descriptor in (1, 2))


def _lines_to(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _as_shown(line: str) -> str:
    """Return what stays of a line in which a progress bar writes over itself."""
    return ESCAPES.sub("", line.rstrip("\r").rpartition("\r")[2]).rstrip()
