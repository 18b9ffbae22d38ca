"""What a watched run reads, and what of it becomes an outcome: the least, the greatest and the last of its readings."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from headwise.experiments.task import Task
from headwise.files.durable import read_lines
from headwise.results.digests import HEALTH
from headwise.results.records import Divergence
from headwise.training.batches import Examples, first, make_batch, move, run_model
from headwise.training.job import Order
from headwise.training.train import Training

if TYPE_CHECKING:
    from headwise.watching.watch import Watch


def watch_run(order: Order, training: Training, model: nn.Module, train: Examples, steps: int) -> Watch:
    """Read a run about fifty times, but never in two steps on end; the report shows readings and alerts."""
    from headwise.watching.logs import JsonLines
    from headwise.watching.watch import watch
    from headwise.watching.whole_model import OF_LOSS

    task = training.task
    # the steps between readings are those whose time and memory are measured
    every = task.watch_every or max(2, steps // 50)
    of_loss = any(name in OF_LOSS for name in task.watch_statistics)
    found = watch(
        model,
        every=every,
        log=[JsonLines(order.folder / HEALTH)],
        on_alert=None,
        statistics=list(task.watch_statistics) or None,
        loss=_fixed_loss(training, model, train) if of_loss else None,
    )
    if training.first_step:
        found.step_to(training.first_step)
    return found


def _fixed_loss(training: Training, model: nn.Module, train: Examples) -> Callable[[], Tensor]:
    """Return the loss that is trained, penalties included, on the first `watch_examples` training examples."""
    task, regularized = training.task, training.regularized

    def loss() -> Tensor:
        # the model's own dropout is that of every other reading
        torch.manual_seed(0)
        # made anew each time: a large batch need not lie on the device between readings
        batch = make_batch(task, move(first(train, task.watch_examples), training.accelerator.device), None)
        found = task.loss(run_model(model, batch.inputs), batch.targets)
        return found if regularized is None else found + regularized.loss()

    return loss


def watched_outcomes(stream: Path, task: Task, divergence: Divergence | None) -> dict[str, float]:
    """Return watched/<statistic>/least, /greatest and /last of the statistics that the task names: means over heads or
    matrices.

    Readings of a run that diverged count up to its divergence; one that is no number is left out.
    """
    wanted = set(task.watch_statistics)
    last = math.inf if divergence is None else divergence.step - 1
    values: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in read_lines(stream) if wanted else ():
        name = record.get("statistic")
        if name in wanted and "alert" not in record and record["step"] <= last:
            values[name][record["step"]].append(math.nan if record["value"] is None else record["value"])
    found: dict[str, float] = {}
    for name in task.watch_statistics:
        means = [math.fsum(v) / len(v) for _, v in sorted(values[name].items()) if all(map(math.isfinite, v))]
        if means:
            kinds = {"least": min(means), "greatest": max(means), "last": means[-1]}
            found |= {f"watched/{name}/{kind}": value for kind, value in kinds.items()}
    return found
