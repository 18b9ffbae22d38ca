"""Checks before a run trains: duplicate names, shapes that do not fit, a count that fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_type_hints

import torch
from torch import nn

from headwise.files.errors import suggest
from headwise.lab.experiments.evaluation import Batch, Evaluation, Metric
from headwise.lab.experiments.subject import Phase
from headwise.lab.experiments.task import Task
from headwise.lab.training.batches import Examples, describe, first, first_batch, make_batch, move, run_model, size
from headwise.lab.training.evaluate import add, count_batch, finished, refuse_undecided
from headwise.lab.training.phases import checkpoint_files, part_of
from headwise.lab.training.task_code import at_fault
from headwise_verdict import StudyError

# first parts of outcome names that do not come from evaluations
OF_THE_CORE = ("gap", "heads", "cost", "alerts", "watched", "rates", "training")
# allowed values of `when` of an evaluation
MOMENTS: tuple[str, ...] = get_args(get_type_hints(Evaluation)["when"])
# number of examples to try: enough for most figures to be defined
FIRST = 16


def evaluations_of(task: Task) -> list[Evaluation]:
    """Return all evaluations of a task: the three built-in ones, replaced if the task names them, then its own."""
    own = _listed(task, "evaluations", Evaluation)
    _refuse_twice(task, "evaluation", (evaluation.name for evaluation in own))
    for evaluation in own:
        _check_evaluation(task, evaluation)
    built_in = {
        "train": Evaluation("train"),
        "validation": Evaluation("validation", when="epoch"),
        "test": Evaluation("test", when="epoch" if task.test_curve else "end"),
    }
    by_name = built_in | {evaluation.name: evaluation for evaluation in own}
    return [evaluation for evaluation in by_name.values() if evaluation.when != "never"]


def check_task(task: Task) -> None:
    """Check a task's declarations before anything is started.

    Raises StudyError for a metric, evaluation or phase named twice, a deciding outcome that nothing produces, an
    unknown statistic, or a phase with an invalid setting or a missing checkpoint.
    """
    name, phases = type(task).__name__, _listed(task, "phases", Phase)
    _check_metrics(task)
    _refuse_twice(task, "metric", (metric.name for metric in task.all_metrics()))
    _refuse_twice(task, "phase", (phase.name for phase in phases))
    evaluations = evaluations_of(task)
    places = [evaluation.name for evaluation in evaluations]
    if task.decides_on not in places:
        raise StudyError(
            f"{name} decides on {task.decides_on!r}, which is not one of its evaluations: {', '.join(places)}."
        )
    if not phases:
        raise StudyError(f"{name}.phases() returned none; a run has at least one.")
    for number, phase in enumerate(phases):
        if phase.folder is not None:
            checkpoint_files(phase.folder)
        try:
            part_of(task, number)
        except StudyError as error:
            raise StudyError(f"phase {phase.name!r}: {error}") from error
    _check_statistics(task)


def _listed(task: Task, member: Literal["evaluations", "phases"], kind: type[Any]) -> list[Any]:
    """Return the evaluations or phases of a task; raise StudyError if that fails or an entry has another type."""
    owner = type(task).__name__
    try:
        entries = list(getattr(task, member)())
    except StudyError:
        raise
    except Exception as error:
        raise StudyError(f"{owner}.{member}() fails: {at_fault(task, error)}") from error
    for entry in entries:
        if not isinstance(entry, kind):
            raise StudyError(f"{owner}.{member}() returned {entry!r}; return a list of headwise.study.{kind.__name__}.")
    return entries


def _check_evaluation(task: Task, evaluation: Evaluation) -> None:
    """Refuse an evaluation with a reserved name, an unknown `when`, or no examples."""
    owner, name = type(task).__name__, evaluation.name
    if evaluation.when not in MOMENTS:
        near = suggest(str(evaluation.when), list(MOMENTS))
        raise StudyError(
            f"{owner}: the evaluation {name!r} is made {evaluation.when!r}.{near} Write one of {', '.join(MOMENTS)}."
        )
    if evaluation.limit is not None and evaluation.limit < 1:
        raise StudyError(
            f"{owner}: the evaluation {name!r} has the limit {evaluation.limit}; an evaluation takes at least 1 "
            "example."
        )
    if not name or name.partition("/")[0] in OF_THE_CORE:
        raise StudyError(
            f"{owner} names an evaluation {name!r}; a name must not be empty or begin with "
            f"{', '.join(OF_THE_CORE)}, which are headwise's own outcomes. Choose another name."
        )


def _check_metrics(task: Task) -> None:
    """Refuse metrics of another type, or with a name that would look like part of an evaluation's name."""
    owner = type(task).__name__
    # the class may hold anything
    metrics: Any = task.metrics
    wrong = [m for m in metrics if not isinstance(m, Metric)] if isinstance(metrics, (tuple, list)) else [metrics]
    if wrong:
        raise StudyError(
            f"{owner}.metrics holds {wrong[0]!r}; give a tuple of headwise.study.Metric, such as (Metric('bleu'),)."
        )
    for metric in task.all_metrics():
        if not metric.name or "/" in metric.name:
            raise StudyError(
                f"{owner} names a metric {metric.name!r}; outcomes are <evaluation>/<metric>, so that it needs a name "
                "without '/'."
            )


def _check_statistics(task: Task) -> None:
    """Refuse names of statistics that do not exist, and rates of statistics that a watched run does not read."""
    owner = type(task).__name__
    if task.head_statistics or task.watch_statistics or task.head_rates:
        from headwise.health import check_statistics

        # sharpness belongs to a training step, so that it is not among head_statistics
        for field, training in (("head_statistics", False), ("watch_statistics", True), ("head_rates", True)):
            try:
                check_statistics(getattr(task, field), training=training)
            except ValueError as error:
                raise StudyError(f"{owner}.{field}: {error}") from error
    unread = sorted(set(task.head_rates) - set(task.watch_statistics or task.head_rates))
    if unread:
        raise StudyError(f"{owner}.head_rates names {unread[0]!r}, which watch_statistics leaves out: add it there.")


def check_first_batch(task: Task, model: nn.Module, train: Examples, *, last: bool = True) -> None:
    """Run a few examples through the plain model, loss, count and finish, so that errors appear before any step.

    With `last`, the deciding outcome must come from this phase.

    Raises StudyError with the shapes of the inputs and outputs.
    """
    weight = next(model.parameters(), None)
    examples = first_batch(task, train, min(FIRST, task.batch_size))
    if weight is not None:
        examples = move(examples, weight.device)
    batch: Batch | None = None
    output: Any = None
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices_of(model)):
            batch = make_batch(task, first(examples, FIRST), None)
            output = run_model(model, batch.inputs)
            loss = task.loss(output, batch.targets)
            if not isinstance(loss, torch.Tensor) or loss.dim():
                raise TypeError(f"loss returned {describe(loss)} instead of a tensor of one number")
            metrics = _count_twice(task, model, examples)
            if last:
                _check_decision(task, metrics)
    except (StudyError, ImportError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        inputs = (
            f"inputs {describe(batch.inputs)}, targets {describe(batch.targets)}"
            if batch is not None
            else "batch() made none of them"
        )
        outputs = "" if output is None else f"; the model returned {describe(getattr(output, 'logits', output))}"
        raise StudyError(
            f"{type(task).__name__} fails on its first {size(examples)} training examples, {describe(examples)}: "
            f"{inputs}{outputs}. {type(error).__name__}: {error}"
        ) from error
    finally:
        model.train(was_training)


def _count_twice(task: Task, model: nn.Module, examples: Examples) -> dict[str, float]:
    """Return the metrics of all the examples plus one of them: sums that cannot be added fail by their shapes."""
    plain = Evaluation("train")
    whole, one = (count_batch(task, plain, model, first(examples, count)) for count in (FIRST, 1))
    sums = {name: add(whole[name], one[name], name, task) if name in one else whole[name] for name in whole}
    return finished(task, plain, sums)


def _check_decision(task: Task, metrics: dict[str, float]) -> None:
    """Refuse metrics without the deciding one, if the task's own count and finish produce it."""
    deciding = next(evaluation for evaluation in evaluations_of(task) if evaluation.name == task.decides_on)
    if deciding.count is None and deciding.finish is None and type(task).summary is Task.summary:
        refuse_undecided(task, {f"{task.decides_on}/{name}": value for name, value in metrics.items()})


def devices_of(model: nn.Module) -> list[int]:
    """Return the CUDA devices whose random generators a model uses."""
    weight = next(model.parameters(), None)
    return [weight.device.index] if weight is not None and weight.device.type == "cuda" else []


def _refuse_twice(task: Task, kind: str, names: Iterable[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise StudyError(f"{type(task).__name__} names the {kind} {twice[0]!r} twice. Give each {kind} its own name.")
