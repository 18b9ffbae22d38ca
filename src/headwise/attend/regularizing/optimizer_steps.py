"""A counter of the optimizer steps on a model, from which forgotten calls of a training loop are detected.

torch calls global hooks before each step of every optimizer. One hook is registered while a counter listens: usually
during the first few steps of a training.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

# After this many steps of other models' optimizers, counting stops for a model that was never trained (an average).
FOREIGN = 100

_listening: weakref.WeakSet[OptimizerSteps] = weakref.WeakSet()
_hooks: list[Any] = []


class OptimizerSteps:
    """A counter of the steps that optimizers begin on a model's parameters.

    `begins` is called before each step with its number, counted from 1 for each optimizer, and the optimizer.
    """

    def __init__(self, model: nn.Module, begins: Callable[[int, Optimizer], None]) -> None:
        self.model, self.begins = model, begins
        self.foreign = 0
        self.counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def listen(self) -> None:
        """Start counting from 0."""
        self.counts.clear()
        self.foreign = 0
        _listening.add(self)
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))

    def stop(self) -> None:
        """Stop counting; the last counter to stop removes the hook."""
        _listening.discard(self)
        _unhook_if_alone()

    def before(self, optimizer: Optimizer) -> None:
        """Count a step that is about to be taken."""
        own = {id(parameter) for parameter in self.model.parameters()}
        if own.isdisjoint(held_by(optimizer)):
            self.foreign += 1
            if self.foreign >= FOREIGN and not self.counts:
                self.stop()
            return
        self.counts[optimizer] = self.counts.get(optimizer, 0) + 1
        self.begins(self.counts[optimizer], optimizer)

    def __getstate__(self) -> dict[str, Any]:
        # A model that is pickled does not carry its optimizers.
        return {"model": self.model, "begins": self.begins, "listens": self in _listening}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Weak references cannot be pickled: counting starts again.
        self.__init__(state["model"], state["begins"])  # type: ignore[misc]  # the direct call is intended
        if state["listens"]:
            self.listen()


def held_by(optimizer: Optimizer) -> set[int]:
    """Return the ids of the parameters that an optimizer holds."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def held_by_any() -> set[int]:
    """Return the ids of the parameters that the optimizers of this process hold; slow, as it walks all objects."""
    # issubclass of the type, because isinstance would load lazy objects.
    optimizers = [value for value in gc.get_objects() if issubclass(type(value), Optimizer)]
    return set().union(*(held_by(optimizer) for optimizer in optimizers if hasattr(optimizer, "param_groups")))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # A compiled step is traced once and cannot count.
    if torch.compiler.is_compiling():
        return
    for counter in list(_listening):
        counter.before(optimizer)
    _unhook_if_alone()


def _unhook_if_alone() -> None:
    if not _listening:
        while _hooks:
            _hooks.pop().remove()
