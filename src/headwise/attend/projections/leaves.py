"""Leaves: the submodules of an attention layer that hold the matrix of a projection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.utils import parametrize

from headwise.attend.projections.adapted import base_of, is_adapted, obstacle
from headwise.attend.projections.sharded import sharded
from headwise.borders import Convolution


@dataclass(eq=False)
class Leaf:
    """A module with one matrix: a Linear, GPT-2's Conv1D (stored transposed), a convolution, or one with adapters.

    Only a 1x1 convolution is a matrix that maps tokens; for others `obstacle` says why they are not.
    """

    name: str
    module: nn.Module
    transposed: bool = False
    obstacle: str = ""

    @property
    def weight(self) -> Tensor:
        """Return `module.weight`: the parameter, or its value through a parametrization or an adapter."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def rows(self) -> int:
        """Return the number of outputs."""
        return self.weight.shape[1 if self.transposed else 0]

    @property
    def columns(self) -> int:
        """Return the number of inputs."""
        groups: int = getattr(base_of(self.module), "groups", 1)
        return self.weight.shape[0 if self.transposed else 1] * groups

    @property
    def grouped(self) -> bool:
        """Return whether each output depends on only some of the inputs, so that the weight is not a matrix."""
        return getattr(self.module, "groups", 1) > 1

    @property
    def bias(self) -> Tensor | None:
        """Return the module's own bias."""
        return getattr(self.module, "bias", None)

    @staticmethod
    def below(module: nn.Module, prefix: str) -> list[Leaf]:
        """Return the leaves below an attention module, in its own order, with qualified names."""
        below = []
        inside: set[nn.Module] = set()
        for name, child in module.named_modules():
            own = name.startswith("headwise.") or ".parametrizations" in f".{name}"
            if name and child not in inside and not own:
                # A base layer and its adapters are one leaf: the layer computes their sum.
                inside.update(child.modules() if is_adapted(child) else ())
                candidate = leaf(f"{prefix}.{name}" if prefix else name, child)
                if candidate is not None:
                    below.append(candidate)
        return below

    def unreadable(self) -> str:
        """Return why the matrix cannot be read, as the end of a sentence; empty if it can."""
        return sharded(self.module, "weight") or obstacle(self.module)


def leaf(name: str, module: nn.Module) -> Leaf | None:
    """Return the module as a leaf, or None if it is not a linear map."""
    if isinstance(module, nn.Embedding) or not hasattr(module, "weight"):
        return None
    weight = module.weight
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return None
    plain = base_of(module)
    if isinstance(plain, Convolution):
        return Leaf(name, module, obstacle=_obstacle(plain))
    if weight.dim() != 2:
        return None
    # transformers' Conv1D computes x @ weight and stores its number of outputs as `nf`.
    return Leaf(name, module, transposed=not isinstance(plain, nn.Linear) and hasattr(plain, "nf"))


def _obstacle(module: Convolution) -> str:
    if module.transposed:
        return "a transposed convolution, whose rows are inputs"
    if module.groups > 1:
        return f"a grouped convolution (groups={module.groups}), in which heads share no matrix"
    return (
        ""
        if set(module.kernel_size) == {1}
        else f"a convolution over {tuple(module.kernel_size)}, which is not a single matrix"
    )


@contextmanager
def still(*modules: nn.Module) -> Iterator[None]:
    """Keep reading weights from changing the state of parametrizations, as torch's spectral norm does in training."""
    owners = (part for module in modules for part in module.modules() if parametrize.is_parametrized(part))
    # get_submodule, because to a type checker the attribute may also be a tensor.
    lists = (owner.get_submodule("parametrizations") for owner in owners)
    modes = {part: part.training for parametrizations in lists for part in parametrizations.modules()}
    try:
        for part in modes:
            part.training = False
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
