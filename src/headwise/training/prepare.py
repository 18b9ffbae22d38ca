"""Preparation of a phase: model, arm, optimizer, watch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from headwise.borders import forget_precision, precision_of_process
from headwise.experiments.arm import read_arm
from headwise.experiments.configuration import derive
from headwise.experiments.phase import Phase
from headwise.experiments.task import Task
from headwise.training.batches import Examples, epoch_steps, first_batch, lengths_of, make_batch, move, size
from headwise.training.fit import fit, starts_of
from headwise.training.heads import watch_run
from headwise.training.job import Order
from headwise.training.measuring import Clock
from headwise.training.optimizer import LearningRate, build_optimizer
from headwise.training.phases import Part, carry_over, check_learned, matches, read_start
from headwise.training.preflight import check_first_batch
from headwise.training.task_code import build_model
from headwise.training.train import Training


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
    part: Part,
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
    model = build_model(task).to(accelerator.device)
    if phase.folder is not None:
        carry_over(phase, model, read_start(phase.folder), str(phase.folder))
    elif before is not None and not before.fitted and phase.start == "previous":
        carry_over(phase, model, before.weights, f"phase {before.phase!r}")
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
    optimizer = build_optimizer(task, model, example, device)
    training = Training(task, model, optimizer, accelerator, configuration.draws, regularized, lengths=lengths)
    training.starts = starts
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
    return training


def leave(training: Training, part: Part) -> Carried:
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
