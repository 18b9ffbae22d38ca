"""Say what a task's own code raised, and where."""

from __future__ import annotations

import inspect
from pathlib import Path
from traceback import walk_tb

from headwise.experiments.task import Task


def at_fault(task: Task, error: Exception) -> str:
    """Say what was raised, and at which line of the task's file."""
    words = f"{type(error).__name__}: {error}".rstrip(".: ")
    file = inspect.getsourcefile(type(task))
    lines = [
        (frame.f_code.co_name, at) for frame, at in walk_tb(error.__traceback__) if frame.f_code.co_filename == file
    ]
    if not lines or file is None:
        return f"{words}."
    name, at = lines[-1]
    return f"{words} (line {at} of {Path(file).name}, in {name})."
