"""Outcomes from head statistics: held-out readings, readings of a watched run, their rates, and alerts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from headwise.health import Watch, check_statistics, read, watch
from headwise.lab.experiments.evaluation import Evaluation
from headwise.lab.experiments.task import Task
from headwise.lab.training.batches import (
    Examples,
    cut_by_length,
    first,
    lengths_of,
    make_batch,
    move,
    run_model,
    size,
    take,
)
from headwise.lab.training.evaluate import answer
from headwise.lab.training.job import Order
from headwise.lab.training.train import Training
from headwise_verdict.files import read_lines
from headwise_verdict.results import Divergence


def watch_run(order: Order, training: Training, model: nn.Module, train: Examples, steps: int) -> Watch:
    """Watch a run with about fifty readings, never in two consecutive steps; the report shows readings and alerts."""
    task = training.task
    # time and memory are measured in the steps between readings
    every = task.watch_every or max(2, steps // 50)
    of_loss = check_statistics(task.watch_statistics, training=True)
    watching = watch(
        model,
        every=every,
        log=order.files.health,
        on_alert=None,
        statistics=list(task.watch_statistics) or None,
        loss=_fixed_loss(training, model, train) if of_loss else None,
    )
    if training.first_step:
        watching.step_to(training.first_step)
    return watching


def _fixed_loss(training: Training, model: nn.Module, train: Examples) -> Callable[[], Tensor]:
    """Return a function of the training loss, penalties included, on the first `watch_examples` training examples."""
    task, regularized = training.task, training.regularized

    def loss() -> Tensor:
        # use the same dropout draws of the model in every reading
        torch.manual_seed(0)
        # made each time, so that a large batch does not occupy the device between readings
        batch = make_batch(task, move(first(train, task.watch_examples), training.accelerator.device), None)
        value = task.loss(run_model(model, batch.inputs), batch.targets)
        return value if regularized is None else value + regularized.loss()

    return loss


# the statistic of which a run may exceed the optimizer's threshold
OF_THRESHOLD = "sharpness_share"


def watched_kinds(statistic: str) -> list[str]:
    """Return the last parts of the names of a watched statistic's outcomes."""
    return ["least", "greatest", "last", *(["beyond"] if statistic == OF_THRESHOLD else [])]


def watched_outcomes(stream: Path, task: Task, divergence: Divergence | None) -> dict[str, float]:
    """Return watched/<statistic>/least, /greatest and /last of the task's statistics: means over heads or matrices.

    sharpness_share has /beyond too: 1 if it exceeded the optimizer's threshold, else 0, whose mean over seeds is a
    share of runs. For a run that diverged, only readings before its divergence count; non-finite ones are left out.
    """
    wanted = set(task.watch_statistics)
    last = math.inf if divergence is None else divergence.step - 1
    values: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in read_lines(stream) if wanted else ():
        name = record.get("statistic")
        if name in wanted and "alert" not in record and record["step"] <= last:
            values[name][record["step"]].append(math.nan if record["value"] is None else record["value"])
    outcomes: dict[str, float] = {}
    for name in task.watch_statistics:
        means = [math.fsum(v) / len(v) for _, v in sorted(values[name].items()) if all(map(math.isfinite, v))]
        if means:
            kinds = {"least": min(means), "greatest": max(means), "last": means[-1]}
            if name == OF_THRESHOLD:
                kinds["beyond"] = float(kinds["greatest"] > 1)
            outcomes |= {f"watched/{name}/{kind}": value for kind, value in kinds.items()}
    return outcomes


# held-out examples to read: enough for means, and cheaper than an epoch
EXAMPLES = 512


@torch.no_grad()
def read_heads(training: Training, evaluation: Evaluation, examples: Examples) -> dict[str, float]:
    """Return heads/<statistic>/… of the trained model: for "layer 3 head 2", "layer 3", "mean" and "worst".

    See `headwise.health.read`. Only the first 512 examples are read.
    """
    task, model = training.task, training.accelerator.unwrap_model(training.model)
    forwards = partial(_run_through, training, evaluation, first(examples, EXAMPLES))
    figures = read(model, task.head_statistics, forwards)
    return {f"heads/{name}/{place}": value for name, of in figures.items() for place, value in of.items()}


def _run_through(training: Training, evaluation: Evaluation, examples: Examples) -> None:
    task, lengths = training.task, lengths_of(training.task, examples)
    batch_size = min(task.batch_size, task.evaluation_batch_size)
    if lengths is None:
        parts = list(torch.arange(size(examples)).split(batch_size))
    else:
        parts = cut_by_length(task, lengths.argsort(stable=True), lengths, batch_size)
    for index in parts:
        answer(training, evaluation, take(examples, index.to(training.accelerator.device)))


# rates are in e-folds per this many steps
STEPS = 1000


def head_rates(stream: Path, names: tuple[str, ...]) -> dict[str, float]:
    """Return rates/<statistic>/rate, the slope of ln(mean over heads) per 1,000 steps, and …/fit, its R².

    Readings whose mean is not above 0 have no logarithm and are left out; a statistic with fewer than three others has
    no outcome.
    """
    rates: dict[str, float] = {}
    for name, means in _courses(stream, names).items():
        points = [(step, math.log(mean)) for step, mean in sorted(means.items()) if mean > 0]
        if len(points) > 2:
            slope, fit = straight_line(points)
            rates |= {f"rates/{name}/rate": STEPS * slope, f"rates/{name}/fit": fit}
    return rates


def straight_line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Return slope and R² of the least-squares line through points (x, y); R² is 1 if all y are equal."""
    count = len(points)
    x_mean, y_mean = (math.fsum(point[axis] for point in points) / count for axis in (0, 1))
    x_spread = math.fsum((x - x_mean) ** 2 for x, _ in points)
    y_spread = math.fsum((y - y_mean) ** 2 for _, y in points)
    covariance = math.fsum((x - x_mean) * (y - y_mean) for x, y in points)
    return covariance / x_spread, covariance**2 / (x_spread * y_spread) if y_spread else 1.0


def _courses(stream: Path, names: tuple[str, ...]) -> dict[str, dict[int, float]]:
    values: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in names}
    for record in read_lines(stream):
        if record.get("statistic") in values and "alert" not in record:
            # a reading that is not finite is written as null; its mean has no logarithm
            values[record["statistic"]][record["step"]].append(math.nan if record["value"] is None else record["value"])
    return {
        name: {step: math.fsum(heads) / len(heads) for step, heads in steps.items()} for name, steps in values.items()
    }


def alert_outcomes(stream: Path, divergence: Divergence | None) -> dict[str, float]:
    """Return alerts/<kind>/step, and for a diverged run alerts/<kind>/lead, the steps from the alert to the divergence.

    Readings count steps from 0, the divergence from 1: a reading of step s saw the weights whose loss is the (s + 1)th.
    """
    first: dict[str, int] = {}
    last = None if divergence is None else divergence.step - 1
    for record in read_lines(stream):
        kind = record.get("alert")
        if kind and (last is None or record["step"] <= last):
            first[kind] = min(record["step"], first.get(kind, record["step"]))
    outcomes = {f"alerts/{kind}/step": float(step) for kind, step in first.items()}
    if last is None:
        return outcomes
    return outcomes | {f"alerts/{kind}/lead": float(last - step) for kind, step in first.items()}
