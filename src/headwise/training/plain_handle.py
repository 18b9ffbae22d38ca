"""The handle of an arm without methods: the calls of `Regularized`, each of which does nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class PlainHandle:
    """Do nothing under the names of a handle's calls, so that a script is the same for every arm."""

    removed = False
    methods: tuple[()] = ()

    def __init__(self, model: nn.Module) -> None:
        self.model, self.step = model, 0

    def loss(self) -> Tensor:
        """Return 0, which changes no bit of a loss it is added to."""
        return torch.zeros(())

    def after_step(self) -> None:
        """Count the step."""
        self.step += 1

    def parameters(self) -> list[nn.Parameter]:
        """Return none: no method brought any."""
        return []

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"step": self.step}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take `state()` of an earlier process."""
        self.step = state["step"]

    def remove(self, discard: bool = False) -> None:
        """Leave the model as it is."""

    def fold(self) -> None:
        """Leave the model as it is."""

    def report(self) -> str:
        """Say that nothing was changed."""
        return "no method: every attention layer is as the model has it"

    def compute_loss_func(self, base: Callable[..., Tensor] | None = None) -> Callable[..., Tensor] | None:
        """Return the loss that was given, for transformers.Trainer."""
        return base

    def callback(self) -> Any:
        """Return a callback of transformers.Trainer that does nothing."""
        from transformers import TrainerCallback

        return TrainerCallback()

    def __repr__(self) -> str:
        return "PlainHandle(no method)"
