"""The learning rate of each step: linear warm-up, then constant, cosine, linear, inverse square root, or plateau."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from headwise.experiments.recipe import Recipe


def warmup_steps(recipe: Recipe, steps: int) -> int:
    """Give the steps of warm-up in a run of `steps` optimizer steps: a number below 1 is their share."""
    return round(recipe.warmup * steps if recipe.warmup < 1 else recipe.warmup)


def share_at(recipe: Recipe, step: int, steps: int) -> float:
    """Give the share of the full learning rate in `step`, counted from 0, of a run of `steps` optimizer steps.

    The warm-up ends at the full rate in its last step. Cosine and linear then go to `final_learning_rate`, which the step
    after the last would reach. The inverse square root is Vaswani et al.'s, 2017: √(warm-up / steps so far).
    """
    warm = warmup_steps(recipe, steps)
    if step < warm:
        return (step + 1) / warm
    if recipe.schedule == "inverse_sqrt":
        return math.sqrt(max(warm, 1) / max(step + 1, 1))
    if recipe.schedule in ("cosine", "linear"):
        end = recipe.schedule_settings()["final_learning_rate"] / recipe.learning_rate
        passed = min(1.0, (step - warm) / max(1, steps - warm))
        left = (1 + math.cos(math.pi * passed)) / 2 if recipe.schedule == "cosine" else 1 - passed
        return end + (1 - end) * left
    return 1.0


class LearningRate:
    """Set the learning rate of an optimizer before each step; `plateau` is torch's own, told of each epoch's loss."""

    def __init__(self, recipe: Recipe, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self.recipe, self.steps = recipe, steps
        self._optimizer = optimizer
        self._plateau: ReduceLROnPlateau | None = None
        if recipe.schedule == "plateau":
            self._plateau = ReduceLROnPlateau(optimizer, **recipe.schedule_settings())

    @property
    def value(self) -> float:
        """Give the learning rate that is set now."""
        return float(self._optimizer.param_groups[0]["lr"])

    def before_step(self, step: int) -> None:
        """Set the rate of optimizer step `step`, counted from 0 over the whole run."""
        warm = warmup_steps(self.recipe, self.steps)
        if self._plateau is None or step < warm:
            self._write(self.recipe.learning_rate * share_at(self.recipe, step, self.steps))

    def after_epoch(self, step: int, loss: float) -> None:
        """Tell `plateau` the loss of an epoch (validation's, or the training loss) that ended after `step` steps."""
        if self._plateau is not None and step >= warmup_steps(self.recipe, self.steps) and math.isfinite(loss):
            self._plateau.step(loss)

    def state(self) -> dict[str, Any]:
        """Give what a resumed run needs, as plain values."""
        if self._plateau is None:
            return {}
        kept = {name: getattr(self._plateau, name) for name in ("best", "num_bad_epochs", "last_epoch")}
        return {**kept, "value": self.value}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take `state()` of the run that goes on."""
        if self._plateau is not None:
            value = state["value"]
            self._plateau.load_state_dict({name: found for name, found in state.items() if name != "value"})
            self._write(value)

    def _write(self, value: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = value
