"""Standard output that carries one JSON object alone, for programs that read a command's answer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from io import UnsupportedOperation
from typing import Any

Show = Callable[[dict[str, Any]], None]


@contextmanager
def json_alone(wanted: bool = True) -> Iterator[Show]:
    """Send what is printed to standard error, also by child processes; the yielded function prints the object.

    If not `wanted`, nothing changes and the function prints nothing.
    """
    if not wanted:
        yield lambda answer: None
        return
    stdout = sys.stdout
    with _children_to_stderr(), redirect_stdout(sys.stderr):
        answers: list[dict[str, Any]] = []
        yield answers.append
    for answer in answers:
        print(json.dumps(answer, allow_nan=False), file=stdout, flush=True)


@contextmanager
def _children_to_stderr() -> Iterator[None]:
    """Point the file descriptor of standard output, which child processes and C libraries use, to standard error."""
    try:
        out, error = sys.stdout.fileno(), sys.stderr.fileno()
    except (UnsupportedOperation, AttributeError):
        # no files, as in a notebook: children have nowhere else to print
        yield
        return
    sys.stdout.flush()
    kept = os.dup(out)
    os.dup2(error, out)
    try:
        yield
    finally:
        # the print that follows reports a pipe whose reader has gone
        with suppress(BrokenPipeError):
            sys.stdout.flush()
        os.dup2(kept, out)
        os.close(kept)
