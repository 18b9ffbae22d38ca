"""Rehearsal before anything trains: every arm once, and a run's evaluations and later phases before its first step."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from headwise.lab.experiments.arm import read_arm
from headwise.lab.experiments.configuration import BASELINE, RunConfiguration
from headwise.lab.experiments.evaluation import Evaluation
from headwise.lab.experiments.task import Task
from headwise.lab.training.batches import epoch_steps, first_batch, lengths_of, make_batch, move, size
from headwise.lab.training.compiled_forward import CompiledForward, compiled
from headwise.lab.training.evaluate import count_batch, explained, finished, made_in
from headwise.lab.training.fit import fit, parameters_of
from headwise.lab.training.job import Order, Rehearsal
from headwise.lab.training.measuring import now
from headwise.lab.training.optimizer import build_optimizer
from headwise.lab.training.phases import RunPart, check_carried, check_learned, part_of, shapes_of, start_shapes
from headwise.lab.training.preflight import FIRST, check_first_batch, devices_of, evaluations_of
from headwise.lab.training.splits import Splits, training_examples
from headwise.lab.training.task_code import build_model, summarized
from headwise.lab.training.train import bare_step
from headwise_verdict import StudyError
from headwise_verdict.files import is_for_users


def rehearse_arms(order: Rehearsal) -> list[dict[str, Any]]:
    """Fit each arm's methods onto a fresh model as its runs will, train two batches, and return what a run costs.

    Entries have arm, layers (reached by the methods), of (attention layers that a method may reach), seconds (per
    step of the first phase), steps (of a run, all phases together), phases and parameters. Layers are those of the
    first phase in which the methods act.

    Raises StudyError naming each arm that fails; a problem shared by several arms is listed once.
    """
    torch.set_num_threads(order.configuration.threads)
    problems: dict[str, list[str]] = {}
    entries: list[dict[str, Any]] = []
    trains = True
    for configuration in order.arms:
        task = dataclasses.replace(order, configuration=configuration).task()
        parts = [part_of(task, at) for at in range(len(task.phases()))]
        later = [at for at, part in enumerate(parts) if at and part.phase.methods]
        try:
            device = torch.device(order.device)
            tried = try_arm(parts[0], configuration, device, trains=trains)
            others = {at: try_arm(parts[at], configuration, device, trains=False) for at in later}
            reach = next((one for one in (tried, *others.values()) if one["of"]), tried)
            steps = tried["steps"] + sum(
                others[at]["steps"] if at in others else _steps(parts[at], configuration) for at in range(1, len(parts))
            )
            entries.append(tried | {"layers": reach["layers"], "of": reach["of"], "steps": steps, "phases": len(parts)})
        except Exception as error:
            if configuration.arm == BASELINE or not (configuration.methods or trains):
                # the first run reports this error in full, with its place
                trains = False
                continue
            if not is_for_users(error):
                error.add_note(f"{configuration.arm} cannot be trained for one batch; no run has begun.")
                raise
            problems.setdefault(str(error), []).append(configuration.arm)
    if problems:
        raise StudyError("\n".join(f"{'; '.join(arms)}: {problem}" for problem, arms in problems.items()))
    return entries


def try_arm(part: RunPart, configuration: RunConfiguration, device: torch.device, *, trains: bool) -> dict[str, Any]:
    """Fit an arm onto a fresh model of one phase, train it for two batches if `trains`, and return its costs."""
    task = part.task
    arm = read_arm(configuration.arm, task)
    train, _ = training_examples(task, configuration, part.phase.data)
    with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
        torch.manual_seed(0)
        model = build_model(task).to(device)
        example = make_batch(task, move(first_batch(task, train, 2), device), None).inputs
        steps = _steps(part, configuration, train)
        handle = fit(arm, model, example=example, seed=configuration.draws, steps=steps) if part.phase.methods else None
        added = parameters_of(arm, handle) if part.phase.methods else []
        names = {fitted.site.name for fitted in handle.fitted} if handle is not None else set()
        reach = {"layers": len(names), "of": len(handle.found) if handle is not None else 0}
        parameters = sum(parameter.numel() for parameter in model.parameters())
        cost: dict[str, Any] = {"parameters": parameters, "steps": steps, "seconds": None}
        if trains:
            batch = move(first_batch(task, train, task.batch_size), device)
            forward = compiled(configuration.compile, task, lengths_of(task, batch), configuration.processes)
            cost["seconds"] = _step_seconds(part, model, handle, batch, example, added, forward)
        if handle is not None:
            handle.remove(discard=True)
    return {"arm": configuration.arm, **reach, **cost}


def _steps(part: RunPart, configuration: RunConfiguration, train: Any = None) -> int:
    """Return the optimizer steps of a phase; its training examples are read unless they are passed."""
    task = part.task
    if task.steps:
        return task.steps
    if train is None:
        train, _ = training_examples(task, configuration, part.phase.data)
    return task.epochs * epoch_steps(task, size(train), lengths_of(task, train), configuration.draws)


def _step_seconds(
    part: RunPart,
    model: nn.Module,
    handle: Any,
    examples: Any,
    example: Any,
    added: list[nn.Parameter],
    forward: CompiledForward | None,
) -> float:
    """Train two steps on one batch and return the seconds of the second; the first is a warm-up."""
    task = part.task
    device = next(model.parameters()).device
    optimizer = build_optimizer(task, model, example, device, added)
    model.train()
    seconds = 0.0
    for _ in range(2):
        start = now(device)
        bare_step(task, model, handle, optimizer, examples, torch.Generator().manual_seed(0), forward)
        seconds = now(device) - start
    return seconds * task.accumulation


# errors of a wrong name or type, which do not depend on the figures
MISTAKES = (KeyError, NameError, AttributeError, TypeError)

# configurations that passed in this process; their runs with other seeds are not tried again
_passed: set[str] = set()


def is_due(order: Order) -> bool:
    """Return whether a run has to be tried: once in a process for each task, its settings and its device."""
    return _key(order) not in _passed


def passed(order: Order) -> None:
    """Record that a run was tried and may train."""
    _passed.add(_key(order))


def rehearse(part: RunPart, model: nn.Module, splits: Splits) -> dict[str, float]:
    """Make the evaluations of a phase on a few examples with the plain model; return the outcomes by name.

    Raises StudyError naming the evaluation if a split, batch, count or finish fails.
    """
    outcomes: dict[str, float] = {}
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices_of(model)):
            for evaluation in made_in(part, splits.evaluations):
                values = _few(part.task, evaluation, model, splits)
                outcomes |= {f"{evaluation.name}/{name}": value for name, value in values.items()}
    finally:
        model.train(was_training)
    return outcomes


def rehearse_summary(task: Task, outcomes: dict[str, float]) -> None:
    """Run the task's summaries of outcomes and of epochs on the outcomes of the rehearsal, as if after one epoch.

    Raises StudyError for invalid names; other failures are ignored, because the figures of an untrained model may allow
    no summary.
    """
    each_epoch = {"train", *(evaluation.name for evaluation in evaluations_of(task) if evaluation.when == "epoch")}
    epoch = {name: value for name, value in outcomes.items() if name.rpartition("/")[0] in each_epoch}
    try:
        summarized(task, outcomes, [epoch])
    except StudyError as error:
        if error.__cause__ is None or isinstance(error.__cause__, MISTAKES):
            raise


def rehearse_later(order: Order, plain: nn.Module, outcomes: dict[str, float]) -> None:
    """Build and try every phase after the first; `plain` is the first phase's plain model, `outcomes` its outcomes.

    Raises StudyError naming the phase if its data, weights to carry or parameters to learn do not exist.
    """
    task, configuration = order.task(), order.configuration
    device = next(plain.parameters()).device
    shapes, before, known = shapes_of(plain), task.phases()[0].name, dict(outcomes)
    for number in range(1, len(task.phases())):
        part = part_of(task, number)
        try:
            model, measured = _try_phase(part, configuration, device, shapes, before)
        except StudyError as error:
            name = f"phase {part.phase.name!r}"
            raise error if str(error).startswith(name) else StudyError(f"{name}: {error}") from error
        shapes, before = shapes_of(model), part.phase.name
        known |= measured | of_phase(part, measured)
    rehearse_summary(part_of(task, len(task.phases()) - 1).task, known)


def of_phase(part: RunPart, outcomes: dict[str, float]) -> dict[str, float]:
    """Return the outcomes of a phase's end under the names <phase>/<evaluation>/<metric>."""
    names = [evaluation.name for evaluation in evaluations_of(part.task) if evaluation.when == "phase"]
    return {f"{part.phase.name}/{name}": value for name, value in outcomes.items() if name.rpartition("/")[0] in names}


def _try_phase(
    part: RunPart,
    configuration: RunConfiguration,
    device: torch.device,
    shapes: dict[str, tuple[int, ...]],
    before: str,
) -> tuple[nn.Module, dict[str, float]]:
    task, phase = part.task, part.phase
    train, validation = training_examples(task, configuration, phase.data)
    with torch.random.fork_rng([device.index] if device.type == "cuda" else []):
        model = build_model(task).to(device)
    if phase.folder is not None:
        check_carried(phase, model, start_shapes(phase.folder), str(phase.folder))
    elif phase.start == "previous":
        check_carried(phase, model, shapes, f"phase {before!r}")
    check_learned(phase, model)
    check_first_batch(task, model, train, last=part.following is None)
    few, held_out = (_first(task, examples, device) for examples in (train, validation))
    splits = Splits(task, device, few, held_out, evaluations_of(task), configuration.purpose == "final")
    return model, rehearse(part, model, splits)


def _few(task: Task, evaluation: Evaluation, model: nn.Module, splits: Splits) -> dict[str, float]:
    examples = splits.few(evaluation, FIRST)
    if examples is None:
        return {}
    # check the lengths of all examples: any may be too long
    lengths_of(task, splits.ahead(evaluation))
    with explained(task, evaluation, examples):
        sums = count_batch(task, evaluation, model, examples)
    try:
        return finished(task, evaluation, sums)
    except StudyError as error:
        if not isinstance(error.__cause__, (ArithmeticError, ValueError)):
            raise
        # a figure undefined on a few examples may be defined on all of them
        return dict.fromkeys((metric.name for metric in task.all_metrics()), float("nan"))


def _first(task: Task, examples: Any, device: torch.device) -> Any:
    return None if examples is None else move(first_batch(task, examples, FIRST), device)


def _key(order: Order) -> str:
    settings = order.configuration.model_dump(mode="json", include={"task", "task_source", "settings", "purpose"})
    return f"{settings} {order.device} {order.data}"
