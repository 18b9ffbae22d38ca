"""Cost: what a step and an answer take in operations and time, measured when a run has been judged."""

from __future__ import annotations

import statistics

import torch

from headwise.comparing.results.records import EpochLine
from headwise.comparing.run.batches import make_batch, run_model
from headwise.comparing.run.examples import Examples, first, place, size
from headwise.comparing.run.operations import counter
from headwise.comparing.run.step_clock import now
from headwise.comparing.run.train import Training

# examples of the batch whose forward is timed, and how often
INFERENCE_BATCH = 64
REPEATS = 3


def flops_per_step(training: Training, examples: Examples) -> int:
    """Count the floating-point operations of one optimizer step by torch's counter: matrix products and attention.

    Forward, backward, penalties and all accumulated batches; the gradients that this leaves are dropped.
    """
    task, regularized = training.task, training.regularized
    model = training.accelerator.unwrap_model(training.model)
    part = first(examples, task.batch_size)
    batch = make_batch(task, part, torch.Generator().manual_seed(0))
    model.train()
    with counter() as counted, training.accelerator.autocast():
        loss = task.loss(run_model(model, batch.inputs), batch.targets)
        (loss if regularized is None else loss + regularized.loss()).backward()
    model.zero_grad(set_to_none=True)
    return counted.get_total_flops() * task.accumulation


@torch.no_grad()
def inference_seconds(training: Training, examples: Examples) -> float:
    """Give the seconds of one example in evaluation mode, in batches of at most 64: the median of three forwards."""
    model, device = training.accelerator.unwrap_model(training.model), place(examples)
    part = first(examples, INFERENCE_BATCH)
    batch = make_batch(training.task, part, None)
    model.eval()
    times = []
    for _ in range(1 + REPEATS):
        start = now(device)
        with training.accelerator.autocast():
            run_model(model, batch.inputs)
        times.append(now(device) - start)
    # the first one warms up
    return statistics.median(times[1:]) / size(part)


def seconds_per_step(history: list[EpochLine]) -> float | None:
    """Give the median over epochs of the time of a step, without the steps that also read or measured; None where no time is known."""
    found = [
        (line.seconds - line.apart.seconds) / (line.steps - line.apart.steps)
        for line in history
        if line.steps > line.apart.steps
    ]
    whole = [line.seconds / line.steps for line in history if line.seconds]
    return statistics.median(found or whole) if found or whole else None
