"""What can be known to be wrong before a run trains: names given twice, shapes that do not fit, a count that fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from headwise.comparing.evaluation import Evaluation
from headwise.comparing.run.batches import make_batch, run_model
from headwise.comparing.run.evaluate import add, count_batch, finished
from headwise.comparing.run.examples import Examples, describe, move, size, take
from headwise.comparing.run.start import checkpoint_files
from headwise.comparing.task import Task
from headwise.files.errors import StudyError

# examples that are tried: enough for most figures to be defined
FIRST = 16


def evaluations_of(task: Task) -> list[Evaluation]:
    """Give all evaluations of a task: the built-in three, replaced where the task names them, then its own."""
    own = task.evaluations()
    _refuse_twice(task, "evaluation", (evaluation.name for evaluation in own))
    built_in = {
        "train": Evaluation("train"),
        "validation": Evaluation("validation", when="epoch"),
        "test": Evaluation("test", when="epoch" if task.test_curve else "end"),
    }
    found = built_in | {evaluation.name: evaluation for evaluation in own}
    return [evaluation for evaluation in found.values() if evaluation.when != "never"]


def check_task(task: Task) -> None:
    """Refuse, before anything is started, what a task says of itself that cannot be.

    Raises StudyError for a metric, evaluation or phase named twice, a deciding outcome that nothing gives, a statistic
    of no such name, a phase without a beginning or from a checkpoint that is missing.
    """
    name, phases = type(task).__name__, task.phases()
    _refuse_twice(task, "metric", (metric.name for metric in task.all_metrics()))
    _refuse_twice(task, "phase", (phase.name for phase in phases))
    evaluations = evaluations_of(task)
    places = [evaluation.name for evaluation in evaluations]
    if task.decides_on not in places:
        raise StudyError(
            f"{name} decides on {task.decides_on!r}, which is none of its evaluations: {', '.join(places)}."
        )
    if not phases:
        raise StudyError(f"{name}.phases() gave none; a run has at least one.")
    for phase in phases:
        if phase.folder is not None:
            checkpoint_files(phase.folder)
    if task.head_statistics:
        from headwise.watching.weights import known_names

        try:
            known_names(list(task.head_statistics))
        except ValueError as error:
            raise StudyError(f"{name}.head_statistics: {error}") from error


def check_first_batch(task: Task, model: nn.Module, train: Examples) -> None:
    """Run a few examples through the plain model, loss, count and finish: what does not fit is said before any step.

    Raises StudyError with the shapes of what was given.
    """
    first = next(model.parameters(), None)
    examples = take(train, slice(0, min(FIRST, task.batch_size, size(train))))
    if first is not None:
        examples = move(examples, first.device)
    batch = make_batch(task, examples, None)
    output: Any = None
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(_devices(model)):
            output = run_model(model, batch.inputs)
            loss = task.loss(output, batch.targets)
            if not isinstance(loss, torch.Tensor) or loss.dim():
                raise TypeError(f"loss gave {describe(loss)}, where one number should be")
            _count_twice(task, model, examples)
    except (StudyError, ImportError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        given = f"inputs {describe(batch.inputs)}, targets {describe(batch.targets)}"
        gave = "" if output is None else f"; the model gave {describe(getattr(output, 'logits', output))}"
        raise StudyError(
            f"{type(task).__name__} fails on its first {size(examples)} training examples, {describe(examples)}: {given}{gave}. "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        model.train(was_training)


def _count_twice(task: Task, model: nn.Module, examples: Examples) -> None:
    """Count all of the examples and one of them: sums that cannot be added show by their shapes."""
    plain = Evaluation("train")
    whole = count_batch(task, plain, model, examples)
    one = count_batch(task, plain, model, take(examples, slice(0, 1)))
    finished(
        task, plain, {name: add(whole[name], one[name], name, task) if name in one else whole[name] for name in whole}
    )


def _devices(model: nn.Module) -> list[int]:
    first = next(model.parameters(), None)
    return [first.device.index] if first is not None and first.device.type == "cuda" else []


def _refuse_twice(task: Task, kind: str, names: Iterable[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise StudyError(
            f"{type(task).__name__} names the {kind} {twice[0]!r} twice. Give each {kind} a name of its own."
        )
