"""The model of a task, as it builds it, or a sentence on what it gave instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headwise.experiments.task import Task
from headwise.files.errors import StudyError
from headwise.training.batches import describe
from headwise.training.faults import at_fault


def build_model(task: Task) -> nn.Module:
    """Let the task build its model; torch's generator is seeded by the caller.

    Raises StudyError where `model` fails, gives no module, or one without parameters.
    """
    owner = type(task).__name__
    try:
        found: Any = task.model()
    except (StudyError, ImportError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise StudyError(f"{owner}.model() fails: {at_fault(task, error)}") from error
    if not isinstance(found, nn.Module):
        raise StudyError(f"{owner}.model() gave {describe(found)}; give a torch.nn.Module.")
    if next(found.parameters(), None) is None:
        raise StudyError(
            f"{owner}.model() gave a {type(found).__name__} without parameters: there is nothing to train."
        )
    return found
