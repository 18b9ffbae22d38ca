"""Calls to a task's own code: its model and summary, or an error that names what it raised and at which line."""

from __future__ import annotations

import inspect
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from torch import nn

from headwise.lab.experiments.task import Task
from headwise.lab.training.batches import describe
from headwise_verdict import StudyError


def at_fault(task: Task, error: Exception) -> str:
    """Return the type and text of an error, and the line of the task's file that raised it."""
    words = f"{type(error).__name__}: {error}".rstrip(".: ")
    file = inspect.getsourcefile(type(task))
    lines = [
        (frame.f_code.co_name, at) for frame, at in walk_tb(error.__traceback__) if frame.f_code.co_filename == file
    ]
    if not lines or file is None:
        return f"{words}."
    name, at = lines[-1]
    return f"{words} (line {at} of {Path(file).name}, in {name})."


def build_model(task: Task) -> nn.Module:
    """Return the task's model; the caller seeds torch's generator.

    Raises StudyError if `model` fails, or returns no module or one without parameters.
    """
    owner = type(task).__name__
    try:
        model: Any = task.model()
    except (StudyError, ImportError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise StudyError(f"{owner}.model() fails: {at_fault(task, error)}") from error
    if not isinstance(model, nn.Module):
        raise StudyError(f"{owner}.model() returned {describe(model)}; return a torch.nn.Module.")
    if next(model.parameters(), None) is None:
        raise StudyError(
            f"{owner}.model() returned a {type(model).__name__} without parameters: there is nothing to train."
        )
    return model


def summarized(task: Task, outcomes: dict[str, float], epochs: list[dict[str, float]]) -> dict[str, float]:
    """Return the outcomes of the task's `summary`, and of its `over_epochs` from those of each epoch.

    Raises StudyError if one of them fails, or returns a name that is not an outcome of a declared metric.
    """
    return _derived(task, "summary", outcomes, dict(outcomes)) | _derived(
        task, "over_epochs", epochs[-1] if epochs else {}, [dict(each) for each in epochs]
    )


def _derived(task: Task, function: str, known: dict[str, float], given: Any) -> dict[str, float]:
    owner, names = f"{type(task).__name__}.{function}", [metric.name for metric in task.all_metrics()]
    try:
        own = {name: float(value) for name, value in getattr(task, function)(given).items()}
    except Exception as error:
        raise StudyError(
            f"{owner} could not derive its outcomes from {', '.join(known) or 'none'}: {at_fault(task, error)}"
        ) from error
    foreign = [name for name in own if name.rpartition("/")[2] not in names or "/" not in name]
    if foreign:
        raise StudyError(
            f"{owner} returned {foreign[0]!r}; name it <evaluation>/<metric> with one of {', '.join(names)}."
        )
    return own
