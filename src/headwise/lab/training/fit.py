"""Fitting an arm's methods onto the model of a task or script, and how far their parameters moved."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attend import Regularized
from headwise.lab.experiments.arm import Arm, read_arm
from headwise.lab.experiments.configuration import derive
from headwise.lab.experiments.script import Script
from headwise_verdict import StudyError
from headwise_verdict.results import OutcomeNames


class PlainHandle:
    """A handle without methods: its calls do nothing, so that a script is the same for every arm."""

    removed = False
    methods: tuple[()] = ()
    # of the run's batches, as `Regularized` keeps it
    order: Any = None

    def __init__(self, model: nn.Module) -> None:
        self.model, self.step = model, 0

    def loss(self) -> Tensor:
        """Return 0, which leaves every bit of a loss unchanged when added to it."""
        return torch.zeros(())

    def after_step(self) -> None:
        """Increase the step count."""
        self.step += 1

    def parameters(self) -> list[nn.Parameter]:
        """Return an empty list: there are no methods to add parameters."""
        return []

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores."""
        return {"step": self.step} | ({} if self.order is None else {"order": self.order.state()})

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the `state()` of an earlier process."""
        self.step = state["step"]
        if self.order is not None:
            self.order.load(state.get("order"))

    def remove(self, discard: bool = False) -> None:
        """Do nothing: the model is unchanged."""

    def fold(self) -> None:
        """Do nothing: the model is unchanged."""

    def report(self) -> str:
        """Return a line saying that no layer was changed."""
        return "no method: every attention layer is as the model has it"

    def compute_loss_func(self, base: Callable[..., Tensor] | None = None) -> Callable[..., Tensor] | None:
        """Return `base` unchanged, for transformers.Trainer."""
        return base

    def callback(self) -> Any:
        """Return a callback of transformers.Trainer that does nothing."""
        from transformers import TrainerCallback

        return TrainerCallback()

    def __repr__(self) -> str:
        return "PlainHandle(no method)"


def fit(arm: Arm, model: nn.Module, *, example: Any, seed: int, steps: int) -> Regularized | None:
    """Fit the methods of an arm onto a model, for a training of `steps` optimizer steps; return None without methods.

    Raises:
        StudyError: if the arm names layers that the model does not have.
        ValueError: if a method does not apply to them.
    """
    if not arm.methods:
        return None
    from headwise.attend import regularize, sites

    if arm.where is not None:
        arm.where.check(sites(model))
    handle = regularize(model, *arm.methods, where=arm.where, example=example, seed=seed)
    for index, name, timed in arm.timed:
        handle.set(handle.methods[index], **{name: timed.schedule(steps)})
    return handle


def fit_arm(
    text: str, model: nn.Module, *, example: Any, seed: int, steps: int | None
) -> tuple[Regularized | PlainHandle, Regularized | None]:
    """Fit an arm's methods; return the handle for the script, and the same handle or None if the arm has no methods.

    Raises:
        StudyError: if the arm names a layer that does not exist, or has a schedule while `steps` is None.
        ValueError: if a method does not apply to the layers.
    """
    arm = read_arm(text, Script(script="python"))
    if arm.timed and steps is None:
        raise StudyError(
            f"{text} holds a schedule, and the length of the training is not known: run.regularize(model, "
            "steps=optimizer steps), or of a Trainer TrainingArguments(max_steps=optimizer steps)."
        )
    regularized = fit(arm, model, example=example, seed=derive(seed, "methods"), steps=steps or 0)
    return (regularized or PlainHandle(model)), regularized


def parameters_of(arm: Arm, regularized: Regularized | None) -> list[nn.Parameter]:
    """Return the parameters that the methods of a task's arm added; none without methods.

    Raises:
        StudyError: if the arm sets a learning rate for such parameters and has none.
    """
    added = [] if regularized is None else regularized.parameters()
    if not added and "method_rate" in dict(arm.changes):
        raise StudyError(f"{arm.text}: no method of the arm adds parameters, so that method_rate changes nothing.")
    return added


def starts_of(regularized: Any | None) -> dict[str, Tensor]:
    """Return copies of the parameters that the methods have just added, by name."""
    if regularized is None:
        return {}
    known = dict(regularized.model.named_parameters())
    return {name: known[name].detach().clone() for name in regularized.brought}


@torch.no_grad()
def moved(model: nn.Module, starts: dict[str, Tensor]) -> dict[str, float]:
    """Return the root mean square change of the parameters, and its ratio to that of their initial values.

    Empty if the methods learn nothing; without the ratio if all parameters start at 0.
    """
    known = dict(model.named_parameters())
    pairs = [(known[name].double(), start.double()) for name, start in starts.items() if name in known]
    count = sum(start.numel() for _, start in pairs)
    if not count:
        return {}
    change = math.fsum(float((now - start).square().sum()) for now, start in pairs)
    size = math.fsum(float(start.square().sum()) for _, start in pairs)
    distances = {OutcomeNames.MOVED: math.sqrt(change / count)}
    return distances | ({OutcomeNames.MOVED_RELATIVE: math.sqrt(change / size)} if size else {})
