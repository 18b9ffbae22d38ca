"""Forwards of a whole model whose layers share work: the reparametrized weights of all layers are computed at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from headwise.attend.projections.sharded import sharded
from headwise.borders import own_parameters, version_of

# Elsewhere the weights of a layer are computed when it runs: stacking them would only copy memory.
TOGETHER_ON = ("cuda",)

# Parametrizations, their weights, and what they compute of them.
Computed = tuple[Sequence[nn.Module], Sequence[nn.Parameter], Sequence[Tensor]]


def matrix_of(weight: Tensor) -> Tensor:
    """Return a weight as a matrix; the kernel of a convolution counts as inputs."""
    return weight.flatten(1) if weight.dim() > 2 else weight


def parted(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the elements of several tensors, which lie one after the other, in their shapes."""
    parts = flat.split([x.numel() for x in like])
    return [part.view(x.shape) for part, x in zip(parts, like, strict=True)]


def differentiable(
    made: Sequence[Tensor], given: Sequence[Tensor], tensors: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of tensors, differentiable again, for those of the weights that were made from them.

    Those of frozen tensors are None.
    """
    pairs = [(x, g) for x, g in zip(made, given, strict=True) if x.requires_grad]
    results, grads = [x for x, _ in pairs], [g for _, g in pairs]
    wanted = [x for x in tensors if x.requires_grad]
    found = iter(torch.autograd.grad(results, wanted, grads, create_graph=True, allow_unused=True))
    return tuple(next(found) if x.requires_grad else None for x in tensors)


def is_plain(weight: Tensor) -> bool:
    """Return whether a weight is no wrapper around other tensors, such as a shard, with operators of its own."""
    return not hasattr(weight, "__tensor_flatten__")


def plain_original(chain: nn.Module | None) -> nn.Parameter | None:
    """Return the weight of a list of parametrizations if it is a plain parameter with all numbers on one device."""
    if chain is None or sharded(chain, "original"):
        return None
    weight = own_parameters(chain).get("original")
    if not isinstance(weight, nn.Parameter) or not is_plain(weight) or weight.is_meta or weight.is_inference():
        return None
    return weight


class WeightsOfForward:
    """One forward of the whole model: the weights of all layers, computed when the first of them is read."""

    def __init__(self, members: Sequence[nn.Module], compute: Callable[[], Iterable[Computed]]) -> None:
        self.members, self.compute = members, compute
        self.known = {id(member) for member in members}
        self.made: dict[bool, dict[int, tuple[nn.Parameter, int, Tensor]]] = {}

    def take(self, member: nn.Module, weight: Tensor) -> Tensor | None:
        """Return the computed weight of a parametrization, or None if it was not computed from this weight."""
        # Reentrant checkpointing runs layers without gradients within a forward that has them.
        graph = torch.is_grad_enabled()
        if graph not in self.made:
            self.made[graph] = {}
            for members, weights, made in self.compute():
                for one, parameter, value in zip(members, weights, made, strict=True):
                    self.made[graph][id(one)] = parameter, version_of(parameter), value
        known, version, computed = self.made[graph].get(id(member), (None, 0, None))
        # Replicas of a model and functional calls bring weights of their own, and a forward may change the model's.
        return computed if known is weight and version_of(weight) == version else None


class _Running(threading.local):
    def __init__(self) -> None:
        self.passes: list[WeightsOfForward] = []


_running = _Running()


def begin(begun: WeightsOfForward) -> Callable[[], None]:
    """Begin a forward of the whole model in this thread, and return what ends it."""
    # Ctrl-C ends a forward without a call of `end`.
    _running.passes[:] = [one for one in _running.passes if one.members[:1] != begun.members[:1]] + [begun]

    def end() -> None:
        # A forward that failed inside another one's layer has been removed with it.
        with suppress(ValueError):
            del _running.passes[_running.passes.index(begun) :]

    return end


def taken(member: nn.Module, weight: Tensor) -> Tensor | None:
    """Return the weight that a running forward has computed for a parametrization, or None."""
    running = next((one for one in reversed(_running.passes) if id(member) in one.known), None)
    return None if running is None else running.take(member, weight)
