"""What a call asks of whatever it passes through: a fitted site, or one that is only looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from headwise.core.method import Method
from headwise.core.method_state import MethodState
from headwise.core.recompute import Pass
from headwise.core.site import Site


@dataclass
class KernelsRan:
    """Which ways of computing attention ran so far.

    Compiled graphs write these fields too. Each stands there from the start and is only ever written by the computation: a
    field that a graph never reads compiles without a guard, while a set that grows would be read, and compiled again.
    """

    explicit: bool = False
    fused: bool = False
    fused_wider: bool = False
    row_statistics: bool = False

    def names(self) -> tuple[str, ...]:
        """Give the names that reports show, sorted."""
        shown = {
            "explicit": self.explicit,
            "fused": self.fused,
            "fused, one coordinate wider": self.fused_wider,
            "rows": self.row_statistics,
        }
        return tuple(name for name, ran in shown.items() if ran)


class PassingCall(Protocol):
    """What a site needs of a call to give it the values of its stack's first self attention."""

    v: Tensor
    queries: int
    keys: int

    @property
    def context(self) -> CallContext:
        """Give what the call passes through."""
        ...

    @property
    def site(self) -> Site:
        """Give the site the call passes through."""
        ...

    def open_pass(self) -> Pass:
        """Give the pass this call is."""
        ...


class CallContext(Protocol):
    """What a call asks of whatever it passes through."""

    @property
    def site(self) -> Site:
        """Give the site."""
        ...

    @property
    def ran(self) -> KernelsRan:
        """Give the note of which kernels served its calls."""
        ...

    @property
    def shares_values(self) -> bool:
        """Tell whether the layers above get this site's values."""
        ...

    def active(self, training: bool) -> Sequence[Method]:
        """Give the methods that act in this mode, in order."""
        ...

    def strength(self, method: Method, name: str) -> Tensor:
        """Give the live field `name` of a method as a 0-d fp32 tensor."""
        ...

    def state_of(self, method: Method) -> MethodState:
        """Give what a method keeps on the site."""
        ...

    def salt(self, method: Method) -> int:
        """Give what tells the draws of a method from those of all others."""
        ...

    def open_pass(self) -> Pass:
        """Count one pass through the site, or find the one that it repeats."""
        ...

    def sites_of(self, method: Method) -> int:
        """Give the number of sites on which a method acts."""
        ...

    def first_values(self, call: PassingCall) -> Tensor | None:
        """Give the values of the stack's first self attention, or None on that site itself."""
        ...
