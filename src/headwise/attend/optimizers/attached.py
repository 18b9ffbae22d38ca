"""What acts on the weights around the steps of an optimizer that exists, by torch's hooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from headwise.attend.methods.qk_clip import clipped
from headwise.attend.methods.reparametrization import HOLDS
from headwise.attend.optimizers.parts import Part, Parts
from headwise.attend.projections.block import whole
from headwise.attend.regularizing.parameter_groups import ParameterGroups
from headwise.files.arguments import is_a

# The keys of a group under which CautiousDecay and AlphaDecay keep the weight decay that they take.
DECAY, ALPHA = TAKEN = "cautious_decay", "alpha_decay"


class Held(NamedTuple):
    """A parameter of an optimizer, its group, and its parts."""

    parameter: nn.Parameter
    group: dict[str, Any]
    parts: list[Part]


class Attached(ABC):
    """Hooks before and after each step of an optimizer, which stays the object that it was.

    Args:
        optimizer: any optimizer of torch, also one of headwise.
    """

    # Whether it fixes the size of weights.
    fixes: ClassVar[bool] = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        check_optimizer(optimizer)
        self.optimizer = optimizer
        # By position, because wrappers such as FSDP2 in Accelerate replace the parameters in the groups.
        self._places: list[tuple[int, int, list[Part]]] = []
        self._hooks: list[Any] = []

    def _attach(self) -> None:
        own = self.optimizer.__dict__.setdefault("headwise_attached", [])
        other = next((one for one in own if type(one) is type(self)), None)
        if other is not None:
            raise ValueError(f"{type(self).__name__} is attached to this optimizer already: remove() it first")
        fixing = next((one for one in own if one.fixes and self.fixes), None)
        if fixing is not None:
            who, other_who = type(self).__name__, type(fixing).__name__
            raise ValueError(f"{who} would change the size of weights that {other_who} fixes: use one of them")
        own.append(self)
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._begin),
            self.optimizer.register_step_post_hook(self._end),
        ]

    def _begin(self, _: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> None:
        if not overflowed(self.optimizer):
            self._before(_has_closure(args, settings))

    def _end(self, *_: Any) -> None:
        if not overflowed(self.optimizer):
            self._after()

    def remove(self) -> None:
        """Stop acting on the steps of the optimizer; the weights stay as they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        own = self.optimizer.__dict__.get("headwise_attached", [])
        own[:] = [one for one in own if one is not self]

    def _find(self, groups: ParameterGroups, parts: dict[int, list[Part]], who: str) -> None:
        """Find the parameters that have parts in the optimizer."""
        self._places = [
            (at, index, parts[id(parameter)])
            for at, group in enumerate(self.optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
            if id(parameter) in parts
        ]
        if not self._places:
            raise ValueError(
                f"{who} finds no matrix of {type(groups.model).__name__} in the optimizer: build the optimizer from "
                "the same groups, of weights that are trained"
            )

    def _held(self, moved: bool = True) -> Iterator[Held]:
        """Return the parameters with parts; with `moved`, those whose gradient is at hand."""
        for at, index, parts in self._places:
            group = self.optimizer.param_groups[at]
            parameter = group["params"][index]
            if not moved or parameter.grad is not None:
                yield Held(parameter, group, parts)

    @abstractmethod
    def _before(self, closure: bool) -> None:
        """Act before a step, in which a closure may compute the gradients."""

    @abstractmethod
    def _after(self) -> None:
        """Act after a step."""


def _has_closure(args: tuple[Any, ...], settings: dict[str, Any]) -> bool:
    # the first argument is the optimizer
    return any(callable(one) for one in (*args[1:], settings.get("closure")))


def check_optimizer(optimizer: object) -> None:
    """Raise TypeError if an object is not an optimizer of torch."""
    is_a("optimizer", optimizer, torch.optim.Optimizer, "a torch optimizer")
    if hasattr(optimizer, "optimizer"):
        raise TypeError(
            f"optimizer must be the one that steps, and {type(optimizer).__name__} wraps another: attach to that one, "
            "before accelerator.prepare"
        )


def refuse_clipping(groups: ParameterGroups, who: str) -> None:
    """Raise ValueError if a method changes, after each step, the size of weights that an optimizer fixes."""
    for site in groups.sites:
        if clipped(site):
            raise ValueError(f"QKClip shrinks the weights at {site.name}, whose size {who} fixes: use one of them")
    for place, module in groups.model.named_modules():
        for name, methods in module.__dict__.get(HOLDS, {}).items():
            raise ValueError(
                f"{methods[0]} writes {place}.{name} after each step, and {who} fixes its size: use one of them"
            )


def refuse_decay(held: Iterable[Held], parts: Parts, keeps: str) -> None:
    """Raise ValueError if weights of fixed size are in a group with a weight decay, also one that was taken."""
    for parameter, group, _ in held:
        for key in ("weight_decay", *TAKEN):
            if group.get(key):
                raise ValueError(
                    f"{keeps} of {parts.name(parameter)}, which {key}={group[key]} cannot change: set it to 0 for the "
                    "matrices"
                )


def overflowed(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a fused optimizer skips this step itself, because its GradScaler found an infinite gradient."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def copies(held: list[Held]) -> list[Tensor]:
    """Return copies of whole parameters."""
    return [whole(one.parameter.detach()).clone() for one in held]
