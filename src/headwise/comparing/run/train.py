"""The one training loop: the data set in memory, batches by index, nothing between steps that a bare loop lacks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from headwise.comparing.run.configuration import derive
from headwise.comparing.run.step_clock import Apart, counted
from headwise.comparing.task import Task

Examples = tuple[Tensor, Tensor]


@dataclass
class Training:
    """Hold what one run trains with: the model as prepared by Accelerate, its optimizer, its methods, its task."""

    task: Task
    model: nn.Module
    optimizer: Any
    accelerator: Accelerator
    seed: int
    regularized: Any | None = None
    watch: Any | None = None
    step: int = 0
    # bytes; the most tensor memory that one training step allocated
    peak_memory: int | None = None
    # seconds of the performance counter; when progress was told last
    told: float = 0.0


@dataclass(frozen=True)
class Epoch:
    """Hold what one epoch measured: means over its steps, in training mode, of the task's own loss and metric."""

    loss: float
    metric: float
    seconds: float
    steps: int
    # of these steps and seconds, those of which time was also spent on a reading or a measurement
    apart: Apart
    # the first step, counted from 1 over the whole run, whose loss was NaN or infinite
    diverged_at: int | None = None


def train_epoch(training: Training, examples: Examples, epoch: int, tell: Callable[[int, float, float], None]) -> Epoch:
    """Train one epoch; `tell(steps, loss, metric)` is called about twice a second."""
    inputs, targets = examples
    seed, world, rank = training.seed, training.accelerator.num_processes, training.accelerator.process_index
    # every draw is a function of (seed, epoch): a resumed run needs no generator state, and no method shifts another
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(derive(seed, "order", epoch)))
    augment = torch.Generator().manual_seed(derive(seed, "augment", epoch, rank))
    torch.manual_seed(derive(seed, "model", epoch, rank))
    batches = [b for b in order.to(inputs.device).split(training.task.batch_size) if len(b) >= world]
    losses = torch.full((2, len(batches)), float("nan"), device=inputs.device)
    training.model.train()
    start, apart, done = time.perf_counter(), Apart(), 0
    for done, batch in enumerate(batches, 1):
        own = batch[rank::world] if world > 1 else batch
        with counted(training, training.step + done, apart):
            loss, metric = _step(training, inputs[own], targets[own], augment, len(own) * world / len(batch))
        losses[0, done - 1], losses[1, done - 1] = loss, metric
        if (now := time.perf_counter()) - training.told > 0.5:
            training.told = now
            tell(done, *losses[:, done - 1].tolist())
            # with several processes all must stop at the same step: the epoch's end
            if world == 1 and not losses[0, :done].isfinite().all():
                break
    losses = training.accelerator.reduce(losses[:, :done], "mean")
    bad = (~losses[0].isfinite()).nonzero()
    seconds = time.perf_counter() - start
    # the loss is looked at now and then: what was trained beyond the first bad one depends on the clock
    kept = int(bad[0]) + 1 if len(bad) else done
    weights = torch.tensor([len(b) for b in batches[:kept]], device=losses.device) / sum(map(len, batches[:kept]))
    mean_loss, mean_metric = (losses[:, :kept] * weights).sum(1).tolist()
    training.step += kept
    diverged = training.step if len(bad) else None
    if kept < done:
        seconds, apart = seconds * kept / done, Apart()
    return Epoch(mean_loss, mean_metric, seconds, kept, apart, diverged)


def _step(
    training: Training, inputs: Tensor, targets: Tensor, augment: torch.Generator, share: float
) -> tuple[Tensor, Tensor]:
    """Take one optimizer step; `share` weighs unequal parts of a batch over several processes."""
    task, regularized = training.task, training.regularized
    output = training.model(task.batch(inputs, augment))
    loss = task.loss(output, targets)
    total = loss if regularized is None else loss + regularized.loss()
    training.optimizer.zero_grad()
    training.accelerator.backward(total if share == 1 else total * share)
    training.optimizer.step()
    if regularized is not None:
        regularized.after_step()
    if training.watch is not None:
        training.watch.step()
    with torch.no_grad():
        return loss.detach() * share, task.metric(output, targets) * share


@torch.no_grad()
def evaluate(training: Training, examples: Examples) -> tuple[float, float]:
    """Give the mean loss and metric over a split, in evaluation mode."""
    inputs, targets = examples
    task, world, rank = training.task, training.accelerator.num_processes, training.accelerator.process_index
    training.model.eval()
    total = torch.zeros(3, dtype=torch.float64, device=inputs.device)
    for own in torch.arange(rank, len(inputs), world, device=inputs.device).split(task.evaluation_batch_size):
        output, expected = training.model(task.batch(inputs[own], None)), targets[own]
        found = torch.stack([task.loss(output, expected), task.metric(output, expected)]).double()
        total += torch.cat([found, found.new_ones(1)]) * len(own)
    loss, metric, count = training.accelerator.reduce(total, "sum").tolist()
    return loss / count, metric / count
