"""One training step without anything around it: what a rehearsal and a timing take."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headwise.experiments.task import Task
from headwise.training.batches import Examples, make_batch, run_model


def bare_step(
    task: Task,
    model: nn.Module,
    handle: Any,
    optimizer: torch.optim.Optimizer,
    examples: Examples,
    generator: torch.Generator,
) -> None:
    """Train one step on one batch; `handle` is that of the methods, or None."""
    batch = make_batch(task, examples, generator)
    loss = task.loss(run_model(model, batch.inputs), batch.targets)
    (loss if handle is None else loss + handle.loss()).backward()
    optimizer.step()
    optimizer.zero_grad()
    if handle is not None:
        handle.after_step()
