"""Execution of one run: it can be stopped at any moment, and resumed with the same numbers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from filelock import FileLock, Timeout
from torch import Tensor, nn

from headwise.borders import forget_precision, precision_of_process
from headwise.files.durable import append_lines, write_json
from headwise.lab.experiments.arm import read_arm
from headwise.lab.experiments.configuration import derive
from headwise.lab.experiments.subject import Phase
from headwise.lab.experiments.task import Task, has_mean_metric
from headwise.lab.training.batches import Examples, epoch_steps, first_batch, lengths_of, make_batch, move, size
from headwise.lab.training.checkpoint import (
    clear_damage,
    cut_readings,
    drop_all,
    drop_previous,
    mark,
    restore_readings,
    save_checkpoint,
    stands,
)
from headwise.lab.training.compiled_forward import compiled
from headwise.lab.training.course import Course
from headwise.lab.training.evaluation_graphs import EvaluationGraphs
from headwise.lab.training.fit import fit, moved, parameters_of, starts_of
from headwise.lab.training.heads import watch_run
from headwise.lab.training.job import Order, is_first_process
from headwise.lab.training.measuring import Clock
from headwise.lab.training.optimizer import LearningRate, build_optimizer
from headwise.lab.training.outcome import describe_epoch, describe_result, judge, measure
from headwise.lab.training.phases import RunPart, carry_over, check_learned, matches, part_of, read_start
from headwise.lab.training.preflight import check_first_batch, evaluations_of
from headwise.lab.training.rehearsal import is_due, of_phase, passed, rehearse, rehearse_later, rehearse_summary
from headwise.lab.training.splits import Splits, training_examples
from headwise.lab.training.state import (
    RunState,
    checkpoint_of,
    load_state,
    restore,
    save_times,
    with_times,
    without_times,
)
from headwise.lab.training.step_graphs import StepGraphs, captures
from headwise.lab.training.task_code import build_model
from headwise.lab.training.train import Training, train_epoch
from headwise_verdict import StudyError
from headwise_verdict.files import restore_lines
from headwise_verdict.results import Divergence, RunResult

# seconds to wait for the lock: a killed worker frees it at once, one that is ending needs a moment
LOCK_PATIENCE = 20.0

Tell = Callable[[dict[str, Any]], None]


def execute(order: Order, tell: Tell) -> RunResult:
    """Carry out one run, from its last complete checkpoint if there is one, and return its result."""
    order.files.make_folder()
    if is_first_process():
        try:
            with FileLock(order.folder / ".lock", timeout=LOCK_PATIENCE):
                order.files.clear_partials()
                clear_damage(order, lambda text: tell({"event": "note", "text": text}))
                return order.result() or _execute(order, tell)
        except Timeout:
            raise StudyError(
                f"another process works on {order.folder}. Wait for it, or choose another --out."
            ) from None
    return order.result() or _execute(order, tell)


def _execute(order: Order, tell: Tell) -> RunResult:
    torch.set_num_threads(order.configuration.threads)
    if is_first_process():
        write_json(order.files.config, order.configuration.model_dump(mode="json"))
    task = order.task()
    state, tensors = _load(order, lambda text: tell({"event": "note", "text": text}))
    _restore_streams(order, state)
    carried: Carried | None = None
    result: RunResult | None = None
    while result is None:
        state, carried, result = _phase(order, part_of(task, state.phase), state, tensors, carried, tell)
        tensors = None
    if is_first_process():
        result = order.files.write_result(result)
        drop_previous(order.folder)
    return result


def _load(order: Order, note: Callable[[str], None]) -> tuple[RunState, dict[str, torch.Tensor] | None]:
    """Return the state and tensors of the last checkpoint, or a fresh state if it lacks readings or names."""
    state, tensors = load_state(order.folder, order.identity, note)
    lacks = ""
    if order.watch and not stands(order.folder, state.readings):
        lacks = f"{order.files.health.name} lacks readings that the checkpoint knows"
    elif tensors is not None and not state.parameters:
        lacks = "its checkpoint does not name the optimizer's parameters"
    if lacks:
        note(f"{order.folder}: {lacks}; the run starts again")
        if is_first_process():
            # in this order, so that an interruption in between still restarts the run from its beginning
            drop_all(order.folder)
            order.files.health.unlink(missing_ok=True)
        return RunState(run=order.identity), None
    return with_times(state, order.folder), tensors


def _phase(
    order: Order,
    part: RunPart,
    state: RunState,
    tensors: dict[str, torch.Tensor] | None,
    before: Carried | None,
    tell: Tell,
) -> tuple[RunState, Carried | None, RunResult | None]:
    """Carry out one phase; return the state after it and what it hands to the next phase, or the result of the run."""
    task, final = part.task, order.configuration.purpose == "final"
    train, validation = training_examples(task, order.configuration, part.phase.data)
    accelerator = accelerator_of(order, task)
    device = accelerator.device
    held_out = None if validation is None else move(validation, device)
    splits = Splits(task, device, move(train, device), held_out, evaluations_of(task), final)

    def look_ahead(model: nn.Module) -> None:
        if part.number == 0 and tensors is None and is_due(order):
            _rehearse(order, part, model, splits)

    training = prepare(order, part, accelerator, train, before, look_ahead)
    try:
        if tensors is not None:
            restore(training, state, tensors, order.folder)
        elif state.phase:
            state = _keep(order, training, state)
        state, divergence = _train(order, part, training, splits, state, tell)
        outcomes: dict[str, float] = {}
        if divergence is None:
            outcomes, divergence = _of_phase(training, splits, part)
        if part.following is not None and divergence is None:
            return state.following(outcomes), leave(training, part), None
        result = describe_result(order, training, state.history, divergence, splits, state.outcomes | outcomes)
        return state, None, result
    finally:
        # leave nothing behind for the next run of this process
        if training.watch is not None:
            training.watch.remove()
        if training.regularized is not None and not training.regularized.removed:
            training.regularized.remove(discard=True)


def _rehearse(order: Order, part: RunPart, model: nn.Module, splits: Splits) -> None:
    """Try the evaluations and later phases before training, so that a mistake in them is not found hours later."""
    outcomes = rehearse(part, model, splits)
    if part.following is None:
        rehearse_summary(part.task, outcomes)
    else:
        rehearse_later(order, model, of_phase(part, outcomes))
    passed(order)


def _train(
    order: Order, part: RunPart, training: Training, splits: Splits, state: RunState, tell: Tell
) -> tuple[RunState, Divergence | None]:
    """Train a phase epoch by epoch, from the state to its end or its divergence."""
    while not _is_over(training, state):
        progress = _progress(part, training, splits, state, tell)
        epoch = train_epoch(training, splits.train, len(state.history) + 1, progress)
        line = describe_epoch(training, epoch, len(state.history) + 1, part.phase.name, splits)
        if training.rates is not None:
            loss = line.metrics.get("validation/loss")
            training.rates.after_epoch(training.step - training.first_step, epoch.loss if loss is None else loss)
        state = state.after(line, training)
        if is_first_process():
            append_lines(order.folder / "metrics.jsonl", [line.model_dump(mode="json")])
        if epoch.divergence is not None:
            if order.watch and is_first_process():
                # how far training went beyond its divergence depends on the clock
                cut_readings(order.folder, training.step)
            return state, epoch.divergence
        state = _keep(order, training, state)
    return state, None


def _is_over(training: Training, state: RunState) -> bool:
    if training.last_step is not None:
        return training.step >= training.last_step
    return state.done >= training.task.epochs


def _of_phase(training: Training, splits: Splits, part: RunPart) -> tuple[dict[str, float], Divergence | None]:
    """Return the outcomes at a phase's end, and the divergence if a loss among them is not finite.

    Outcomes are named <phase>/<evaluation>/<metric>.
    """
    wanted = splits.only([evaluation for evaluation in splits.evaluations if evaluation.when == "phase"])
    outcomes = measure(training, wanted, "phase")
    distances = moved(training.accelerator.unwrap_model(training.model), training.starts)
    # the result judges those of the last phase together with all others
    divergence = judge(training, wanted, outcomes) if part.following is not None else None
    return {f"{part.phase.name}/{name}": value for name, value in outcomes.items()} | distances, divergence


def _restore_streams(order: Order, state: RunState) -> None:
    """Cut the streams back to the checkpoint: what a killed process wrote beyond it is trained again."""
    if not is_first_process():
        return
    restore_lines(order.files.metrics, [line.model_dump(mode="json") for line in state.history])
    if order.watch:
        restore_readings(order.folder, state.readings, state.step)


def _keep(order: Order, training: Training, state: RunState) -> RunState:
    """Write a checkpoint of the state and return the state as written."""
    if is_first_process():
        state = state.model_copy(update={"readings": mark(order.folder, state.readings) if order.watch else None})
        # write the times first: a checkpoint without them has lost them
        save_times(order.folder, state.model_copy(update={"peak_memory": training.clock.memory.peak}))
        save_checkpoint(order.folder, checkpoint_of(without_times(state), training))
    return state


def _progress(
    part: RunPart, training: Training, splits: Splits, state: RunState, tell: Tell
) -> Callable[[int, float, float], None]:
    task = training.task
    per_epoch = epoch_steps(task, size(splits.train), training.lengths, training.seed)
    total = task.steps or per_epoch * task.epochs
    before, start = training.step - training.first_step, time.perf_counter()
    name = task.metric_name if has_mean_metric(task) else ""

    def report(step: int, loss: float, metric: float) -> None:
        share = min(1.0, (before + step) / total)
        remaining = (time.perf_counter() - start) / step * (total - before - step)
        epochs = -(-total // per_epoch) if task.steps else task.epochs
        line = {
            "event": "progress",
            "epoch": state.done + 1,
            "epochs": epochs,
            "done": (part.number + share) / part.total,
        }
        tell(line | {"loss": loss, "metric": metric, "name": name, "left": max(0.0, remaining)})

    return report


@dataclass(frozen=True)
class Carried:
    """The weights that a phase hands to the next; `fitted` tells whether they include its methods' parameters."""

    weights: dict[str, Tensor]
    fitted: bool
    phase: str
    step: int
    clock: Clock
    # initial values of the methods' parameters, if these are included
    starts: dict[str, Tensor]


def accelerator_of(order: Order, task: Task) -> Accelerator:
    """Return the Accelerator that places a run on its device and processes."""
    device = torch.device(order.device)
    if device.index is not None:
        torch.cuda.set_device(device)
    precision = "bf16" if task.dtype == "bfloat16" else "no"
    # Accelerate keeps one precision for a process and refuses another, and arms and phases may differ in it
    if precision_of_process(precision) != precision:
        forget_precision()
    return Accelerator(cpu=device.type == "cpu", mixed_precision=precision)


def prepare(
    order: Order,
    part: RunPart,
    accelerator: Accelerator,
    train: Examples,
    before: Carried | None,
    look_ahead: Callable[[nn.Module], None] = lambda model: None,
) -> Training:
    """Build the model of a phase, the arm's methods on it, optimizer and watch; `before` comes from the previous phase.

    `look_ahead` is called with the plain model.

    Raises StudyError for weights that do not fit, and for data that the model, the loss or the count cannot take.
    """
    configuration, device, task, phase = order.configuration, torch.device(order.device), part.task, part.phase
    later = (phase.name,) if part.number else ()
    torch.manual_seed(derive(configuration.draws, "weights", *later))
    model = _plain_model(part, accelerator, before)
    check_first_batch(task, model, train, last=part.following is None)
    look_ahead(model)
    arm = read_arm(configuration.arm, task)
    lengths = lengths_of(task, train)
    steps = task.steps or task.epochs * epoch_steps(task, size(train), lengths, configuration.draws)
    example = make_batch(task, move(first_batch(task, train, 2), accelerator.device), None).inputs
    seed = derive(configuration.draws, "methods", *later)
    regularized = fit(arm, model, example=example, seed=seed, steps=steps) if phase.methods else None
    starts = starts_of(regularized)
    if before is not None and before.fitted and phase.start == "previous":
        carry_over(phase, model, before.weights, f"phase {before.phase!r}")
        starts |= {name: start for name, start in before.starts.items() if matches(name, phase.carry)}
    _freeze(phase, model)
    added = parameters_of(arm, regularized) if phase.methods else []
    optimizer = build_optimizer(task, model, example, device, added)
    training = Training(task, model, optimizer, accelerator, configuration.draws, regularized, lengths=lengths)
    training.starts = starts
    training.compiled = compiled(configuration.compile, task, lengths, accelerator.num_processes)
    if task.loss_goal is not None:
        training.course = Course(task.loss_goal, task.divergence_smoothing)
    training.rates = LearningRate(task, optimizer, steps)
    if before is not None:
        training.step = training.first_step = before.step
        training.clock = before.clock
    if task.steps is not None:
        training.last_step = training.first_step + task.steps
    if order.watch:
        # in every process, because a reading is a collective operation; the first process writes it
        training.watch = watch_run(order, training, model, train, steps)
    training.model = accelerator.prepare(model)
    if captures(order.graphs, task, accelerator.device, accelerator.num_processes):
        _capture(training)
    return training


def _plain_model(part: RunPart, accelerator: Accelerator, before: Carried | None) -> nn.Module:
    """Return the model of a phase without methods, with the weights from which it starts."""
    phase, model = part.phase, build_model(part.task).to(accelerator.device)
    if phase.folder is not None:
        carry_over(phase, model, read_start(phase.folder), str(phase.folder))
    elif before is not None and not before.fitted and phase.start == "previous":
        carry_over(phase, model, before.weights, f"phase {before.phase!r}")
    return model


def _capture(training: Training) -> None:
    """Let the steps and evaluations of a phase run as CUDA graphs; compiled steps are captured by the compiler."""
    fitted = [] if training.regularized is None else training.regularized.fitted
    if training.compiled is None:
        training.graphs = StepGraphs(training.optimizer, training.accelerator.device, fitted)
    training.evaluation_graphs = EvaluationGraphs(training.accelerator.device, fitted)


def leave(training: Training, part: RunPart) -> Carried:
    """Return what a phase hands to the next: its weights, with the methods' parameters if they act there too."""
    model = training.accelerator.unwrap_model(training.model)
    stays = training.regularized is not None and part.following is not None and part.following.methods
    if training.regularized is not None and not stays:
        # reparametrized weights become plain ones, to the bit
        training.regularized.fold()
        if not training.regularized.removed:
            training.regularized.remove(discard=True)
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return Carried(weights, stays, part.phase.name, training.step, training.clock, training.starts if stays else {})


def _freeze(phase: Phase, model: nn.Module) -> None:
    if phase.learn == ("*",):
        return
    learned = set(check_learned(phase, model))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in learned)
