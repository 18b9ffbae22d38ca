"""The training loop: data in memory, batches by index, and no more work per step than in a bare loop."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from headwise.lab.experiments.configuration import derive
from headwise.lab.experiments.evaluation import Batch
from headwise.lab.experiments.task import Task, has_mean_metric
from headwise.lab.training.batches import (
    Examples,
    describe,
    draw_epoch,
    make_batch,
    place,
    size,
    take,
    training_batches,
)
from headwise.lab.training.compiled_forward import CompiledForward, forward_and_loss
from headwise.lab.training.course import Course
from headwise.lab.training.divergence import Smoothed
from headwise.lab.training.evaluation_graphs import EvaluationGraphs
from headwise.lab.training.measuring import Clock, counted, is_read
from headwise.lab.training.optimizer import LearningRate
from headwise.lab.training.step_graphs import StepGraphs
from headwise_verdict import StudyError
from headwise_verdict.results import Apart, Divergence


def bare_step(
    task: Task,
    model: nn.Module,
    handle: Any,
    optimizer: torch.optim.Optimizer,
    examples: Examples,
    generator: torch.Generator,
    compiled: CompiledForward | None = None,
) -> None:
    """Train one step on one batch; `handle` is the methods' handle, or None."""
    batch = make_batch(task, examples, generator)
    _, loss = (compiled or forward_and_loss)(task, model, batch.inputs, batch.targets)
    (loss if handle is None else loss + handle.loss()).backward()
    optimizer.step()
    optimizer.zero_grad()
    if handle is not None:
        handle.after_step()


@dataclass
class Training:
    """What one phase trains with: the model as prepared by Accelerate, its optimizer, its methods, its task.

    The optimizer is torch's own, because Accelerate's wrapper looks up packages on disk in every step.
    """

    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    accelerator: Accelerator
    seed: int
    regularized: Any | None = None
    watch: Any | None = None
    compiled: CompiledForward | None = None
    # captured steps and evaluations, on a CUDA device
    graphs: StepGraphs | None = None
    evaluation_graphs: EvaluationGraphs | None = None
    rates: LearningRate | None = None
    # lengths of the training examples, if they differ
    lengths: Tensor | None = None
    # steps taken in the whole run; the first step of this phase; its last (None: its epochs decide)
    step: int = 0
    first_step: int = 0
    last_step: int | None = None
    smoothed: Smoothed = field(default_factory=Smoothed)
    # with a goal of the training loss
    course: Course | None = None
    # initial values of the parameters added by the methods
    starts: dict[str, Tensor] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    # time of the last progress report, in seconds of the performance counter
    reported: float = 0.0


@dataclass(frozen=True)
class Epoch:
    """The measurements of one epoch: means over its steps, in training mode, of the task's loss and metric."""

    loss: float
    # None for a task that counts its metrics, which happens only in evaluations
    metric: float | None
    seconds: float
    steps: int
    # the part of these steps and seconds that includes readings or measurements
    apart: Apart
    divergence: Divergence | None = None


def train_epoch(training: Training, examples: Examples, epoch: int, tell: Callable[[int, float, float], None]) -> Epoch:
    """Train one epoch and return its measurements; `tell(steps, loss, metric)` is called about twice a second."""
    seed, world, rank = training.seed, training.accelerator.num_processes, training.accelerator.process_index
    # all draws depend on (seed, epoch) alone: a resumed run needs no generator state, and methods cannot shift each
    # other's draws
    steps = _steps(training, examples, epoch)
    augment = torch.Generator().manual_seed(derive(seed, "augment", epoch, rank))
    # before the first step, so that none waits for a copy
    sizes = [[max(1, len(range(rank, len(index), world))) for index in group] for group in steps]
    drawn = draw_epoch(training.task, sizes, augment, place(examples))
    torch.manual_seed(derive(seed, "model", epoch, rank))
    # loss, metric and weight of each step
    measured = torch.full((3, len(steps)), float("nan"), device=place(examples))
    training.model.train()
    start, done = time.perf_counter(), 0
    training.clock.apart = {"steps": 0, "seconds": 0.0}
    for done, (group, draws) in enumerate(zip(steps, drawn, strict=True), 1):
        compiles = _compiles(training, sizes[done - 1])
        device, number = training.accelerator.device, training.step + done
        with counted(training.clock, training.watch, device, number, compiles) as measures:
            loss, metric, weight = _step(training, examples, group, draws, number, measures)
        for slot, value in zip(measured[:, done - 1], (loss, metric, weight), strict=True):
            # assigning a Python number would copy it to the device and wait for it
            slot.copy_(value) if isinstance(value, Tensor) else slot.fill_(value)
        if (now := time.perf_counter()) - training.reported > 0.5:
            training.reported = now
            tell(done, *measured[:2, done - 1].tolist())
            # several processes must stop at the same step, the epoch's end
            if world == 1 and _diverged(training, copy.copy(training.smoothed), measured[0, :done]):
                break
    measured = training.accelerator.reduce(measured[:, :done], "mean")
    divergence = _diverged(training, training.smoothed, measured[0])
    seconds = time.perf_counter() - start
    # the loss is checked now and then, so the number of steps after the first bad one depends on the clock: drop them
    valid = divergence.step - training.step if divergence else done
    weights = measured[2, :valid] / measured[2, :valid].sum()
    mean_loss, mean_metric = (measured[:2, :valid] * weights).sum(1).tolist()
    training.step += valid
    if training.course is not None:
        training.course.add(measured[0, :valid].tolist())
    apart = Apart.model_validate(training.clock.apart)
    if valid < done:
        seconds, apart = seconds * valid / done, Apart()
    return Epoch(mean_loss, mean_metric if has_mean_metric(training.task) else None, seconds, valid, apart, divergence)


def _compiles(training: Training, sizes: list[int]) -> bool:
    """Return whether the next step, on batches of these sizes, has to be compiled first; a step that is read is not."""
    return training.compiled is not None and not is_read(training.watch) and training.compiled.is_first(sizes)


def _diverged(training: Training, smoothed: Smoothed, losses: Tensor) -> Divergence | None:
    return smoothed.first_bad(training.task, losses.tolist(), training.step)


def _steps(training: Training, examples: Examples, epoch: int) -> list[tuple[Tensor, ...]]:
    """Return the batches of each optimizer step of an epoch, before they are divided among processes."""
    task = training.task
    batches = training_batches(task, size(examples), training.lengths, training.seed, epoch)
    # a single copy to the device
    parts = torch.cat(batches).to(place(examples)).split([len(batch) for batch in batches])
    together = task.accumulation
    steps = [tuple(parts[at : at + together]) for at in range(0, len(parts), together)]
    return steps if training.last_step is None else steps[: training.last_step - training.step]


def _step(
    training: Training,
    examples: Examples,
    group: tuple[Tensor, ...],
    drawn: list[Any],
    number: int,
    measures: bool = False,
) -> tuple[Tensor, Tensor | float, Tensor | float]:
    """Take optimizer step `number`, counted from 1 over the run, on its batches; return loss, metric and weight.

    `drawn` is what the task drew for each batch.
    A step that `measures`, by a reading or otherwise, is never captured.
    """
    task, accelerator, regularized = training.task, training.accelerator, training.regularized
    world, rank = accelerator.num_processes, accelerator.process_index
    # a process without examples takes one with weight 0, because all processes must synchronize after every step
    own = [index[rank::world] if len(index) > rank else index[:1] for index in group] if world > 1 else group
    batches = [make_batch(task, take(examples, index), draws) for index, draws in zip(own, drawn, strict=True)]
    shares, weight = _shares(training, group, batches)
    if training.rates is not None:
        training.rates.before_step(number - 1 - training.first_step)
    if training.graphs is None or measures:
        measured = _update(training, batches, shares)
    else:
        measured = training.graphs.step(partial(_update, training), batches, shares)
    if regularized is not None:
        regularized.after_step()
    if training.watch is not None:
        training.watch.step()
    if len(measured) == 1:
        return *measured[0], weight
    loss, metric = (_total([part[kind] for part in measured]) for kind in (0, 1))
    assert isinstance(loss, Tensor)
    return loss, metric, weight


def _update(training: Training, batches: list[Batch], shares: list[Any]) -> list[tuple[Tensor, Tensor | float]]:
    """Move the parameters by the gradients of all batches of a step; return loss and metric of each batch."""
    training.optimizer.zero_grad()
    measured = [
        _backward(training, batch, share, last=at == len(batches))
        for at, (batch, share) in enumerate(zip(batches, shares, strict=True), 1)
    ]
    if training.task.clip is not None:
        nn.utils.clip_grad_norm_(training.model.parameters(), training.task.clip)
    training.optimizer.step()
    return measured


def _total(parts: list[Any]) -> Tensor | float:
    # keep Python numbers: tensors would be copied to the device
    return torch.stack(parts).sum() if isinstance(parts[0], Tensor) else math.fsum(parts)


def _backward(training: Training, batch: Batch, share: Tensor | float, *, last: bool) -> tuple[Tensor, Tensor | float]:
    """Add the gradients of one batch, weighted by its `share` of the step; return loss and metric."""
    task, regularized, accelerator = training.task, training.regularized, training.accelerator
    # synchronize gradients with the other processes once a step
    with nullcontext() if last or accelerator.num_processes == 1 else accelerator.no_sync(training.model):
        # a watch reads what a graph does not show
        forward = None if is_read(training.watch) else training.compiled
        output, loss = (forward or forward_and_loss)(task, training.model, batch.inputs, batch.targets)
        if not loss.requires_grad:
            raise StudyError(
                f"{type(task).__name__}.loss returned {describe(loss)} that has no gradient, so that nothing would be "
                "learned: compute it from the model's output, neither detached nor counted."
            )
        total = loss if regularized is None else loss + regularized.loss()
        (total if share is None else total * share).backward()
    with torch.no_grad():
        metric = task.metric(output, batch.targets) if has_mean_metric(task) else float("nan")
        return (loss.detach(), metric) if share is None else (loss.detach() * share, metric * share)


def _shares(training: Training, group: tuple[Tensor, ...], batches: list[Batch]) -> tuple[list[Any], Tensor | float]:
    """Return each batch's share of the step's mean loss (None: the whole), and the step's weight in the epoch."""
    task, world = training.task, training.accelerator.num_processes
    rank = training.accelerator.process_index
    if type(task).weight is Task.weight:
        total = sum(map(len, group))
        if len(group) == 1 and world == 1:
            return [None], total
        counts = [len(index[rank::world]) for index in group]
        return [count * world / total for count in counts], total
    weights = [
        task.weight(batch.targets) if len(index) > rank else 0.0 for index, batch in zip(group, batches, strict=True)
    ]
    if len(group) == 1 and world == 1:
        return [None], weights[0]
    device = training.accelerator.device
    counted_weights = torch.stack([torch.as_tensor(weight, device=device).double() for weight in weights])
    whole = training.accelerator.reduce(counted_weights.sum(), "sum")
    return list((counted_weights * world / whole).float()), whole.float()
