"""The loss of each step of a transformers.Trainer, which hands it to no callback."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import Tensor

from headwise.watching.trainer_reports import caller_of

NAME = "training_step"


class StepLosses:
    """Adds up what a Trainer's `training_step` returns for the batches of one optimizer step, on their device."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._own = trainer, trainer.__dict__.get(NAME)
        self._sum: Tensor | None = None
        step = getattr(trainer, NAME)

        @functools.wraps(step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            loss = step(*args, **kwargs)
            if isinstance(loss, Tensor) and loss.numel() == 1:
                self._sum = loss.detach() if self._sum is None else self._sum + loss.detach()
            return loss

        self._standing = training_step
        setattr(trainer, NAME, training_step)

    def take(self) -> Tensor | None:
        """Return the loss of the step that ended, and begin the next."""
        found, self._sum = self._sum, None
        return found

    def leave(self) -> None:
        """Put the own step of the Trainer back, where nobody put another around this one."""
        if self._trainer.__dict__.get(NAME) is not self._standing:
            return
        if self._own is None:
            delattr(self._trainer, NAME)
        else:
            setattr(self._trainer, NAME, self._own)


def losses_of(callback: Any) -> StepLosses | None:
    """Return the losses of the Trainer that calls a callback; None where none does."""
    module = sys.modules.get("transformers.trainer")
    trainer = None if module is None else caller_of(callback, module.Trainer)
    return None if trainer is None else StepLosses(trainer)
