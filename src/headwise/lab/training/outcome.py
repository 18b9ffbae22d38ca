"""Records of an epoch, a phase and a finished run, and the costs of a step and a prediction."""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor

from headwise.attend import Site
from headwise.files.provenance import device_hardware
from headwise.health import first_maps
from headwise.lab.experiments.evaluation import Evaluation
from headwise.lab.training.batches import (
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
from headwise.lab.training.divergence import in_evaluations
from headwise.lab.training.evaluate import answer, evaluate, forward_of, refuse_nan, refuse_undecided
from headwise.lab.training.heads import alert_outcomes, head_rates, read_heads, watched_outcomes
from headwise.lab.training.job import Order, is_first_process
from headwise.lab.training.measuring import counter, now
from headwise.lab.training.splits import Splits
from headwise.lab.training.task_code import summarized
from headwise.lab.training.train import Epoch, Training
from headwise_verdict import StudyError
from headwise_verdict.results import Divergence, EpochLine, RunResult

# examples of the batch whose forward is timed, and number of repetitions
INFERENCE_BATCH = 64
REPEATS = 3


def flops_per_step(training: Training, examples: Examples) -> int:
    """Return the floating-point operations of one optimizer step: matrix products and attention, by torch's counter.

    Includes forward, backward, penalties and all accumulated batches; the gradients are dropped afterwards. If lengths
    differ, the step uses batches of median size.
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
    """Return the examples of one training batch; if lengths differ, the batch of median size in the first epoch."""
    task, lengths = training.task, training.lengths
    if lengths is None:
        return first(examples, task.batch_size)
    batches = training_batches(task, size(examples), lengths, training.seed, 1)
    by_size = sorted(batches, key=lambda batch: len(batch) * int(lengths[batch].max()))
    return take(examples, by_size[len(batches) // 2].to(place(examples)))


@torch.no_grad()
def inference_seconds(training: Training, evaluation: Evaluation, examples: Examples) -> float:
    """Return the seconds per example in evaluation mode, in batches of at most 64: the median of three forwards."""
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
    # the first forward is a warm-up
    return statistics.median(times[1:]) / size(part)


def seconds_per_step(history: list[EpochLine]) -> float | None:
    """Return the median time of a step over epochs, without readings and measurements; None if unknown."""
    bare = [
        (line.seconds - line.apart.seconds) / (line.steps - line.apart.steps)
        for line in history
        if line.steps > line.apart.steps
    ]
    whole = [line.seconds / line.steps for line in history if line.seconds]
    return statistics.median(bare or whole) if bare or whole else None


# values of Evaluation.when, each at least as frequent as the one before
RHYTHMS = ("end", "phase", "epoch")


def describe_epoch(training: Training, epoch: Epoch, number: int, phase: str, splits: Splits) -> EpochLine:
    """Return one epoch as a line of the metric stream, with the evaluations made after every epoch."""
    assert training.rates is not None
    metrics: dict[str, float | None] = {"train/loss": epoch.loss}
    if epoch.metric is not None:
        metrics[f"train/{training.task.metric_name}"] = epoch.metric
    if epoch.divergence is None:
        metrics |= measure(training, splits, "epoch")
    return EpochLine(
        epoch=number,
        phase=phase,
        step=training.step,
        steps=epoch.steps,
        seconds=round(epoch.seconds, 4),
        apart=epoch.apart.model_copy(update={"seconds": round(epoch.apart.seconds, 4)}),
        learning_rate=training.rates.value,
        metrics=metrics,
    )


def measure(training: Training, splits: Splits, least: str) -> dict[str, float]:
    """Return the outcomes <evaluation>/<metric> of the evaluations made at least as often as `least`."""
    outcomes: dict[str, float] = {}
    for evaluation in splits.evaluations:
        if RHYTHMS.index(evaluation.when) < RHYTHMS.index(least):
            continue
        examples = splits.examples(evaluation)
        if examples is not None:
            values = evaluate(training, evaluation, examples)
            outcomes |= {f"{evaluation.name}/{name}": value for name, value in values.items()}
    return outcomes


def describe_result(
    order: Order,
    training: Training,
    history: list[EpochLine],
    divergence: Divergence | None,
    splits: Splits,
    outcomes: dict[str, float],
) -> RunResult:
    """Return the result of a finished run; a non-finite loss at the end is a divergence at the last step.

    `outcomes` are those of earlier phases and of this phase's end. Raises StudyError for a metric that is not finite
    while the loss is.
    """
    metrics: dict[str, float | None] = {}
    if divergence is None:
        measured = _at_the_end(training, history, splits)
        divergence = judge(training, splits, measured)
        if divergence is None:
            metrics |= outcomes | measured
            metrics |= _derived(training, outcomes | measured, history)
            if training.course is not None:
                metrics |= training.course.outcomes()
            if order.configuration.purpose == "final":
                refuse_undecided(training.task, metrics)
    metrics.setdefault(training.task.primary(), None)
    if order.watch:
        metrics |= alert_outcomes(order.files.health, divergence)
        if divergence is None:
            metrics |= head_rates(order.files.health, training.task.head_rates)
        metrics |= watched_outcomes(order.files.health, training.task, divergence)
    metrics |= _costs(order, training, history, splits, finished=divergence is None)
    ways = {"steps": training.compiled or training.graphs, "evaluations": training.evaluation_graphs}
    hardware = (order.environment.get("hardware") or {}) | device_hardware(training.accelerator.device)
    return order.ended(
        metrics,
        divergence,
        steps=training.step,
        epochs=len(history),
        phases=list(dict.fromkeys(line.phase for line in history)),
        hardware=hardware | {name: one.told() for name, one in ways.items() if one is not None},
    )


def _at_the_end(training: Training, history: list[EpochLine], splits: Splits) -> dict[str, float]:
    """Return the outcomes of all evaluations; held-out results of the last epoch are reused."""
    last = history[-1].metrics
    known = {
        name: value
        for name, value in last.items()
        if value is not None and any(_belongs(name, e) for e in splits.evaluations if e.when == "epoch")
    }
    missing = [e for e in splits.evaluations if not any(_belongs(name, e) for name in known)]
    return known | measure(training, splits.only(missing), "end")


def _belongs(name: str, evaluation: Evaluation) -> bool:
    # figures of training in the stream are means over the steps, not an evaluation
    return evaluation.name != "train" and name.rpartition("/")[0] == evaluation.name


def judge(training: Training, splits: Splits, measured: dict[str, float]) -> Divergence | None:
    """Return a divergence if an evaluation's loss is not finite; raise StudyError for other non-finite metrics."""
    by_evaluation: dict[str, dict[str, float]] = {evaluation.name: {} for evaluation in splits.evaluations}
    for name, value in measured.items():
        evaluation, _, metric = name.rpartition("/")
        if evaluation in by_evaluation:
            by_evaluation[evaluation][metric] = value
    divergence = in_evaluations(by_evaluation, training.step)
    if divergence is None:
        for evaluation, metrics in by_evaluation.items():
            refuse_nan(training.task, evaluation, metrics)
    return divergence


def _derived(training: Training, outcomes: dict[str, float], history: list[EpochLine]) -> dict[str, float]:
    """Return the gaps train − test, and the outcomes that the task derives itself."""
    task = training.task
    names = [metric.name for metric in task.all_metrics()]
    gaps = {
        f"gap/{name}": outcomes[f"train/{name}"] - outcomes[f"test/{name}"]
        for name in names
        if f"train/{name}" in outcomes and f"test/{name}" in outcomes
    }
    epochs = [{name: value for name, value in line.metrics.items() if value is not None} for line in history]
    own = summarized(task, outcomes, epochs)
    undefined = [name for name, value in own.items() if not math.isfinite(value)]
    if undefined:
        raise StudyError(
            f"{type(task).__name__} derived {undefined[0]!r} as {own[undefined[0]]}. Let it define what an undefined "
            "figure counts as, or leave it out."
        )
    return gaps | own


def _costs(
    order: Order, training: Training, history: list[EpochLine], splits: Splits, *, finished: bool
) -> dict[str, float | None]:
    """Return the costs of the run; they are measured last, so that they cannot change any other figure."""
    if training.watch is not None:
        # its readings are of training, and it occupies the sites whose heads are read now
        training.watch.remove()
        training.watch = None
    model = training.accelerator.unwrap_model(training.model)
    costs: dict[str, float | None] = {
        "seconds_per_step": seconds_per_step(history),
        "peak_memory_bytes": training.clock.memory.peak,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    heads: dict[str, float] = {}
    if finished and order.configuration.purpose == "final":
        deciding, judged = splits.judged()
        if training.task.head_statistics:
            heads = read_heads(training, deciding, judged)
        if training.task.shows_maps:
            tokens, layers = read_maps(training, deciding, judged)
            if is_first_process():
                order.files.write_maps(tokens, layers)
        costs["inference_seconds_per_example"] = inference_seconds(training, deciding, judged)
        costs["flops_per_step"] = flops_per_step(training, splits.train)
    return {**heads, **{f"cost/{name}": value for name, value in costs.items()}}


# decimal digits of the weights, which a picture shows as colours
DIGITS = 3


Layer = tuple[str, int, list[list[list[float]]]]


def read_maps(training: Training, evaluation: Evaluation, examples: Examples) -> tuple[int, list[Layer]]:
    """Return the tokens of the first example, and name, depth and rounded maps of the first and last self-attention."""
    model = training.accelerator.unwrap_model(training.model)
    tokens, maps = first_maps(model, lambda: answer(training, evaluation, first(examples, 1)))
    return tokens, [_layer(site, weights) for site, weights in maps]


def _layer(site: Site, weights: Tensor) -> Layer:
    heads = [[[round(weight, DIGITS) for weight in row] for row in rows] for rows in weights.tolist()]
    return site.name, site.depth, heads
