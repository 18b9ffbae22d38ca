"""What a fitted site asks of whatever it belongs to: a handle, or a stand-in while a model is only looked at."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from headwise.core.call import Call
from headwise.core.call_context import PassingCall
from headwise.core.forward import Forward
from headwise.core.method import Method


class Owner(Protocol):
    """What a fitted site asks of its handle.

    Attributes:
        seed: of the run's draws.
        forward: the forward of the whole model that runs now.
        fresh: whether a training forward came by since the loss was read; sites set it.
        differentiates: whether a training forward of the whole model with gradients runs now.
    """

    seed: int
    forward: Forward
    fresh: bool
    differentiates: bool

    def count(self, method: Method) -> int:
        """Give the number of sites on which a method acts."""
        ...

    def share_values(self, call: PassingCall) -> None:
        """Keep the values of a stack's first self attention for the layers above."""
        ...

    def first_values(self, call: PassingCall) -> Tensor | None:
        """Give the values of the stack's first self attention, or None on that site itself."""
        ...

    def record(self, call: Call) -> None:
        """Take the penalties of a call."""
        ...
