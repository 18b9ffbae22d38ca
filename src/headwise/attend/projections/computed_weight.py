"""Weights that methods compute: what is assigned to one's `.data` would be lost, as a merged adapter is."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

# without an import of peft by the user, nothing merges into a weight behind its module
MERGERS = "peft.tuners.tuners_utils"


class ComputedWeight(Tensor):
    """A computed weight, whose operations give plain tensors, and whose data cannot be replaced."""

    # as of parameters: operations take as long as on a plain tensor
    __torch_function__ = nn.Parameter.__torch_function__

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The numbers, as a plain tensor; assignment raises RuntimeError."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise RuntimeError(
            "headwise's methods compute this weight, so what is merged into it would be lost: call handle.fold() "
            "before adapters are merged"
        )


def guard(module: nn.Module, name: str) -> None:
    """Let `module.name`, a property of torch's class for this parametrized module alone, give guarded weights."""
    cls = type(module)
    compute = cls.__dict__[name]

    def read(self: nn.Module) -> Any:
        weight = compute.fget(self)
        # compiled graphs write to no weight
        if torch.compiler.is_compiling() or MERGERS not in sys.modules or type(weight) is not Tensor:
            return weight
        return weight.as_subclass(ComputedWeight)

    setattr(cls, name, property(read, compute.fset))
