"""Optimizer steps: told to whoever asks, so that calls which a training loop forgot can be named.

torch shows every optimizer's steps to hooks of its own. One hook stands there while somebody listens: usually for the
first few steps of a training.
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

# Steps of other models' optimizers after which a model that is never trained, such as a running average, is left alone.
FOREIGN = 100

_listening: weakref.WeakSet[OptimizerSteps] = weakref.WeakSet()
_hooks: list[Any] = []


class OptimizerSteps:
    """Counts the steps that optimizers begin on a model's parameters.

    Args:
        model: the model; optimizers that hold none of its parameters are not counted.
        begins: called before each step with its number, counted from 1 and for each optimizer apart, and the optimizer.
    """

    def __init__(self, model: nn.Module, begins: Callable[[int, Optimizer], None]) -> None:
        self.model, self.begins = model, begins
        self.foreign = 0
        self.counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def listen(self) -> None:
        """Begin to count, from 0."""
        self.counts.clear()
        self.foreign = 0
        _listening.add(self)
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))

    def stop(self) -> None:
        """Count no more; the last one to stop takes the hook away."""
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
        # Optimizers are no part of a model that is saved whole.
        return {"model": self.model, "begins": self.begins, "listens": self in _listening}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Weak references cannot be saved: the counts begin anew.
        self.__init__(state["model"], state["begins"])  # type: ignore[misc]  # a call of __init__ by hand is meant
        if state["listens"]:
            self.listen()


def held_by(optimizer: Optimizer) -> set[int]:
    """Return the ids of the parameters that an optimizer holds."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def held_by_any() -> set[int]:
    """Return the ids of the parameters that the optimizers of this process hold; it looks at all objects, so it is
    slow."""
    # The type and not the object is asked: lazy objects would be loaded by it.
    alive = [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]
    return set().union(*(held_by(one) for one in alive if hasattr(one, "param_groups")))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # A compiled step is traced once and cannot count.
    if torch.compiler.is_compiling():
        return
    for one in list(_listening):
        one.before(optimizer)
    _unhook_if_alone()


def _unhook_if_alone() -> None:
    if not _listening:
        while _hooks:
            _hooks.pop().remove()
