"""Forward: the state of one forward pass, separate for each thread that runs the model.

Compiled code cannot keep it separate, because whatever a graph writes to thread-local storage is lost at its end. It
uses plain attributes instead, which eager code keeps up to date too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# The padding of a forward by the tensor that separates its sequences: layers that run again in backward may belong to
# an earlier forward than the last.
paddings = WeakIdKeyDictionary()


@dataclass
class Running:
    """One forward of the whole model.

    Attributes:
        samples: batch size of the first tensor argument, or None without one.
        running: whether the forward of the whole model is running, not just that of a layer.
        carried: values of the first self attention, by stack.
        given: indices of the sites that received these values outside a forward of the whole model.
        compiled: whether compiled code began the forward.
        may_pack: whether, judging by the arguments, a row may hold several sequences.
        positions: the `position_ids` of the call; None in compiled code.
        padding: which tokens of the call are the model's padding token, bool (B, T), or None if unknown.
        packings: the packings seen in this forward, by the arguments that define them.
        endings: what ends the preparations that methods made for it.
    """

    samples: int | None = None
    running: bool = False
    carried: dict[str, Tensor] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)
    compiled: bool = False
    may_pack: bool = True
    positions: Tensor | None = None
    padding: Tensor | None = None
    packings: dict[Any, Any] = field(default_factory=dict)
    endings: list[Callable[[], None]] = field(default_factory=list)


class Forward:
    """The current forward of the whole model in each thread."""

    def __init__(self) -> None:
        self.latest = Running()
        self.mine = threading.local()

    def begin(
        self, samples: int | None, may_pack: bool = True, positions: Tensor | None = None, padding: Tensor | None = None
    ) -> None:
        """Begin a forward on a batch of `samples`; `may_pack` says whether a row may hold several sequences."""
        if torch.compiler.is_compiling():
            # Always the same object: a graph would guard on a new one at each call.
            latest = self.latest
            latest.samples, latest.running, latest.compiled, latest.may_pack = samples, True, True, may_pack
            latest.carried.clear()
        else:
            self.latest = self.mine.now = Running(
                samples, True, may_pack=may_pack, positions=positions, padding=padding
            )

    def end(self) -> None:
        """End the forward. The batch size stays available to layers that the backward pass recomputes."""
        now = self.now()
        now.running = False
        now.carried.clear()
        if not torch.compiler.is_compiling():
            while now.endings:
                now.endings.pop()()

    def now(self) -> Running:
        """Return the running forward, or the last one."""
        # Eager code between two graphs of one forward must read what the graph wrote.
        if torch.compiler.is_compiling() or self.latest.compiled:
            return self.latest
        return getattr(self.mine, "now", self.latest)

    # Thread-local state can be neither copied nor pickled: copies and loaded models start with a new one.
    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        return Forward()

    def __reduce__(self) -> tuple[type[Forward], tuple[()]]:
        return Forward, ()


class Entered:
    """A slot that keeps one value of a site's forward for a later stage of the same forward."""

    def __init__(self) -> None:
        self.latest: Any = None
        self.mine = threading.local()

    def put(self, x: Any) -> None:
        """Keep x."""
        self.latest = x
        if not torch.compiler.is_compiling():
            self.mine.x = x

    def take(self) -> Any:
        """Return the kept value and empty the slot."""
        # Emptied so that a value left by a failed forward does not reach the next one.
        x, self.latest = self.latest, None
        if not torch.compiler.is_compiling():
            mine, self.mine.x = getattr(self.mine, "x", None), None
            # A compiled graph puts its value into the plain attribute alone.
            return x if mine is None else mine
        return x

    def look(self) -> Any:
        """Return the kept value without emptying the slot."""
        return self.latest if torch.compiler.is_compiling() else getattr(self.mine, "x", self.latest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Entered:
        return Entered()

    def __reduce__(self) -> tuple[type[Entered], tuple[()]]:
        return Entered, ()
