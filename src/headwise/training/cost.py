"""Cost: what a step and an answer take in operations and time, measured when a run has been judged."""

from __future__ import annotations

import statistics

import torch

from headwise.experiments.evaluation import Evaluation
from headwise.results.records import EpochLine
from headwise.training.batches import (
    Examples,
    first,
    first_batch,
    make_batch,
    place,
    run_model,
    size,
    take,
    training_batches,
)
from headwise.training.evaluate import forward_of
from headwise.training.measuring import counter, now
from headwise.training.train import Training

# examples of the batch whose forward is timed, and how often
INFERENCE_BATCH = 64
REPEATS = 3


def flops_per_step(training: Training, examples: Examples) -> int:
    """Count the floating-point operations of one optimizer step by torch's counter: matrix products and attention.

    Forward, backward, penalties and all accumulated batches; the gradients that this leaves are dropped. Where lengths
    differ it is a step of batches of middle size.
    """
    task, regularized = training.task, training.regularized
    model = training.accelerator.unwrap_model(training.model)
    batch = make_batch(task, _middle_batch(training, examples), torch.Generator().manual_seed(0))
    model.train()
    with counter() as counted, training.accelerator.autocast():
        loss = task.loss(run_model(model, batch.inputs), batch.targets)
        (loss if regularized is None else loss + regularized.loss()).backward()
    model.zero_grad(set_to_none=True)
    return counted.get_total_flops() * task.accumulation


def _middle_batch(training: Training, examples: Examples) -> Examples:
    """Return the examples of one training batch; of the first epoch's batches the one of middle size where lengths
    differ."""
    task, lengths = training.task, training.lengths
    if lengths is None:
        return first(examples, task.batch_size)
    batches = training_batches(task, size(examples), lengths, training.seed, 1)
    by_size = sorted(batches, key=lambda batch: len(batch) * int(lengths[batch].max()))
    return take(examples, by_size[len(batches) // 2].to(place(examples)))


@torch.no_grad()
def inference_seconds(training: Training, evaluation: Evaluation, examples: Examples) -> float:
    """Return the seconds of one example in evaluation mode, in batches of at most 64: the median of three forwards."""
    model, device = training.accelerator.unwrap_model(training.model), place(examples)
    part = first_batch(training.task, examples, INFERENCE_BATCH)
    batch = make_batch(training.task, part, None, evaluation.batch)
    forward = forward_of(evaluation)
    model.eval()
    times = []
    for _ in range(1 + REPEATS):
        start = now(device)
        with training.accelerator.autocast():
            forward(model, batch.inputs)
        times.append(now(device) - start)
    # the first one warms up
    return statistics.median(times[1:]) / size(part)


def seconds_per_step(history: list[EpochLine]) -> float | None:
    """Return the median over epochs of the time of a step, without the steps that also read or measured; None where no
    time is known."""
    found = [
        (line.seconds - line.apart.seconds) / (line.steps - line.apart.steps)
        for line in history
        if line.steps > line.apart.steps
    ]
    whole = [line.seconds / line.steps for line in history if line.seconds]
    return statistics.median(found or whole) if found or whole else None
