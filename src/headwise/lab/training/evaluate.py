"""Evaluation: metrics from sums over a whole split, independent of batch size and number of processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from headwise.lab.experiments.evaluation import Batch, Evaluation, Rows, Sums
from headwise.lab.experiments.task import Task
from headwise.lab.training.batches import (
    Examples,
    describe,
    evaluation_batches,
    lengths_of,
    make_batch,
    place,
    run_model,
    size,
    take,
)
from headwise.lab.training.measuring import is_read
from headwise.lab.training.phases import RunPart
from headwise.lab.training.task_code import at_fault
from headwise.lab.training.train import Training
from headwise_verdict import StudyError

# names of the sums added here if a task's count() returns no loss
LOSS, WEIGHT = "headwise.loss", "headwise.weight"


@torch.no_grad()
def evaluate(training: Training, evaluation: Evaluation, examples: Examples) -> dict[str, float]:
    """Return the metrics of an evaluation by name, computed in evaluation mode; a figure that is NaN stays NaN.

    Raises StudyError if `count` or `finish` returns something that cannot be used.
    """
    task, accelerator = training.task, training.accelerator
    if evaluation.limit is not None:
        examples = take(examples, slice(0, evaluation.limit))
    lengths, device = lengths_of(task, examples), place(examples)
    parts = evaluation_batches(task, size(examples), lengths, accelerator.process_index, accelerator.num_processes)
    # the plain model, because an evaluation may call more than its forward, and processes may have unequal numbers of
    # batches
    model = accelerator.unwrap_model(training.model)
    if accelerator.num_processes > 1:
        _share_buffers(model)
    model.eval()
    sums: dict[str, Any] = {}
    with explained(task, evaluation, examples):
        for index in parts:
            for name, value in _counted(training, evaluation, model, take(examples, index.to(device))).items():
                sums[name] = add(sums[name], value, name, task) if name in sums else value
    if accelerator.num_processes > 1:
        sums = _over_processes(task, sums, device)
    return finished(task, evaluation, sums)


def made_in(part: RunPart, evaluations: list[Evaluation]) -> list[Evaluation]:
    """Return the evaluations made in a phase: all of them in the last phase."""
    return [each for each in evaluations if part.following is None or each.when in ("phase", "epoch")]


@contextmanager
def explained(task: Task, evaluation: Evaluation, examples: Examples) -> Iterator[None]:
    """Add the evaluation, its examples and the line of the task's file to errors raised by the task's own code."""
    try:
        yield
    except (StudyError, ImportError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise StudyError(
            f"{type(task).__name__} fails in the evaluation {evaluation.name!r} of {describe(examples)}: "
            f"{at_fault(task, error)}"
        ) from error


def _counted(training: Training, evaluation: Evaluation, model: Any, examples: Examples) -> Sums:
    """Return the sums over one batch, by a captured graph where the training has some and no reading is due."""
    task = training.task
    if training.evaluation_graphs is None or is_read(training.watch):
        return count_batch(task, evaluation, model, examples)
    batch = make_batch(task, examples, None, evaluation.batch)
    return training.evaluation_graphs.sums(
        evaluation.name, lambda batch: _sums_of(task, evaluation, model, batch), batch
    )


def count_batch(task: Task, evaluation: Evaluation, model: Any, examples: Examples) -> Sums:
    """Return the sums over one batch, loss included; floating-point sums are in double precision."""
    return _sums_of(task, evaluation, model, make_batch(task, examples, None, evaluation.batch))


def _sums_of(task: Task, evaluation: Evaluation, model: Any, batch: Batch) -> Sums:
    output = (evaluation.output or run_model)(model, batch.inputs)
    sums = (evaluation.count or task.count)(output, batch.targets)
    if not isinstance(sums, dict) or not all(isinstance(value, (Tensor, Rows)) for value in sums.values()):
        raise StudyError(
            f"{type(task).__name__}.count returned {describe(sums)}; return a dict of tensors (sums, or Rows)."
        )
    plain = evaluation.output is None and evaluation.count is None
    if plain and "loss" not in sums and type(task).count is not Task.count:
        weight = torch.as_tensor(task.weight(batch.targets)).double()
        sums = sums | {LOSS: task.loss(output, batch.targets).double() * weight, WEIGHT: weight}
    return {name: _wide(value) for name, value in sums.items()}


def forward_of(evaluation: Evaluation) -> Callable[[Any, Any], Any]:
    """Return the function that runs one forward of an evaluation: the plain forward unless it makes its own batches."""
    return evaluation.output or run_model if evaluation.batch is not None else run_model


def answer(training: Training, evaluation: Evaluation, examples: Examples) -> None:
    """Run the model on a batch of an evaluation, for the observers attached to it."""
    batch = make_batch(training.task, examples, None, evaluation.batch)
    forward_of(evaluation)(training.accelerator.unwrap_model(training.model), batch.inputs)


def add(one: Tensor | Rows, other: Tensor | Rows, name: str, task: Task) -> Tensor | Rows:
    """Return the sum of two sums, or the concatenation of rows; raise StudyError if the shape of a sum changes."""
    if isinstance(one, Rows) and isinstance(other, Rows):
        return Rows(torch.cat([one.tensor, other.tensor]))
    if isinstance(one, Rows) or isinstance(other, Rows) or one.shape != other.shape:
        shapes = " and then ".join(
            f"rows {tuple(value.tensor.shape)}" if isinstance(value, Rows) else str(tuple(value.shape))
            for value in (one, other)
        )
        raise StudyError(
            f"{type(task).__name__}.count returned {name!r} in the shape {shapes}: a sum has the same shape in every "
            "batch. Sum over examples and tokens first, or give Rows(tensor) to keep one row an example."
        )
    # sums of two batches may be on different devices
    return one + other.to(one.device)


def finished(task: Task, evaluation: Evaluation, sums: dict[str, Any]) -> dict[str, float]:
    """Return the metrics computed from all sums; raise StudyError if `finish` fails or returns an undeclared metric."""
    owner, known = type(task).__name__, [metric.name for metric in task.all_metrics()]
    loss = {"loss": sums[LOSS] / sums[WEIGHT]} if LOSS in sums else {}
    plain = {
        name: value.tensor if isinstance(value, Rows) else value
        for name, value in sums.items()
        if name not in (LOSS, WEIGHT)
    }
    try:
        with _double_quotients():
            metrics = (evaluation.finish or task.finish)(plain)
        if not isinstance(metrics, dict):
            raise TypeError(f"it returned {describe(metrics)}, not a dict")
        numbers = {name: float(value) for name, value in (loss | metrics).items()}
    except Exception as error:
        raise StudyError(
            f"{owner}.finish could not make the metrics of {evaluation.name!r} from {describe(plain)}: "
            f"{type(error).__name__}: {error}."
        ) from error
    foreign = sorted(set(numbers) - set(known))
    if foreign:
        raise StudyError(
            f"{owner} returned the metric {foreign[0]!r}, which it does not declare; its metrics are "
            f"{', '.join(known)}. "
            f"Add Metric({foreign[0]!r}) to metrics, or leave it out."
        )
    return numbers


@contextmanager
def _double_quotients() -> Iterator[None]:
    """Make quotients of counts double precision: torch uses its default dtype, in which k/n is rounded."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def refuse_nan(task: Task, evaluation: str, metrics: dict[str, float]) -> None:
    """Raise StudyError for a metric that is not finite while the loss is: the metric is wrong, not the training."""
    bad = [name for name, value in metrics.items() if not math.isfinite(value)]
    if bad and math.isfinite(metrics.get("loss", 0.0)):
        raise StudyError(
            f"{type(task).__name__}: the metric {bad[0]!r} of {evaluation!r} is {metrics[bad[0]]}, while the loss "
            "is a number. Let finish() say what an undefined figure counts as."
        )


def refuse_undecided(task: Task, outcomes: Mapping[str, float | None]) -> None:
    """Raise StudyError if the outcomes of a finished run lack the deciding one."""
    primary = task.primary()
    if primary not in outcomes:
        place, _, name = primary.rpartition("/")
        measured = ", ".join(known.rpartition("/")[2] for known in outcomes if known.rpartition("/")[0] == place)
        raise StudyError(
            f"{type(task).__name__} decides on {primary!r}, and nothing returns it: {place!r} returned "
            f"{measured or 'no metric'}. Let "
            f"finish() return {name!r}, or put another metric first, or name another evaluation in decides_on."
        )


def _wide(value: Tensor | Rows) -> Tensor | Rows:
    if isinstance(value, Rows):
        return value
    return value.double() if value.is_floating_point() else value.long()


def _share_buffers(model: nn.Module) -> None:
    """Copy the buffers of the first process, whose model is saved, to all others: running means differ between them."""
    for buffer in model.buffers():
        # a non-contiguous view cannot be broadcast
        whole = buffer.contiguous()
        torch.distributed.broadcast(whole, 0)
        if whole is not buffer and not torch.equal(whole, buffer):
            buffer.copy_(whole)


def _over_processes(task: Task, own: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the sums of all processes, added in the order of their ranks; a process without examples adds nothing."""
    moved = {name: Rows(v.tensor.cpu()) if isinstance(v, Rows) else v.cpu() for name, v in own.items()}
    whole: dict[str, Any] = {}
    for counted in gather_object([moved]):
        for name, value in counted.items():
            whole[name] = add(whole[name], value, name, task) if name in whole else value
    return whole
