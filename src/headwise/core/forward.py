"""Forward: what belongs to one forward pass, apart for each thread that runs the model.

Code that is compiled cannot keep it apart: what it writes to a thread's own storage is lost at the end of its graph. It
uses plain attributes, which code in eager mode keeps up to date too.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Running:
    """One forward of the whole model.

    Attributes:
        samples: the batch size of the model's first tensor, or None where it takes none.
        running: whether the model's own forward runs now, and not a part of it alone.
        carried: by stack, the values of its first self attention.
        given: the sites, by index, that got these values outside the model's own forward.
        compiled: whether compiled code began it.
        may_pack: whether its rows may hold several sequences each, as far as its arguments tell.
        positions: that the model was called with, where code is not compiled.
        packings: by what tells them, the packings seen in it.
    """

    samples: int | None = None
    running: bool = False
    carried: dict[str, Tensor] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)
    compiled: bool = False
    may_pack: bool = True
    positions: Tensor | None = None
    packings: dict[Any, Any] = field(default_factory=dict)


class Forward:
    """Return the forward of the whole model that runs now in this thread."""

    def __init__(self) -> None:
        self.latest = Running()
        self.mine = threading.local()

    def begin(self, samples: int | None, may_pack: bool = True, positions: Tensor | None = None) -> None:
        """Begin a forward on a batch of so many samples, whose rows may hold several sequences each or do not."""
        if torch.compiler.is_compiling():
            # One object that stays: a graph writes into it, and would guard on a new one at each call.
            latest = self.latest
            latest.samples, latest.running, latest.compiled, latest.may_pack = samples, True, True, may_pack
            latest.carried.clear()
        else:
            self.latest = self.mine.now = Running(samples, True, may_pack=may_pack, positions=positions)

    def end(self) -> None:
        """End the forward; the batch size stays known for what backward runs again."""
        now = self.now()
        now.running = False
        now.carried.clear()

    def now(self) -> Running:
        """Return the forward that runs, or the last one."""
        # Code between two graphs of one forward runs eagerly: it must read what the graph wrote.
        if torch.compiler.is_compiling() or self.latest.compiled:
            return self.latest
        return getattr(self.mine, "now", self.latest)

    # What belongs to a thread's forward can be neither copied nor saved: copies and loaded models begin anew.
    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        return Forward()

    def __reduce__(self) -> tuple[type[Forward], tuple[()]]:
        return Forward, ()


class Entered:
    """Keeps one thing of a site's forward until a later stage of the same forward takes it."""

    def __init__(self) -> None:
        self.latest: Any = None
        self.mine = threading.local()

    def put(self, x: Any) -> None:
        """Keep x."""
        self.latest = x
        if not torch.compiler.is_compiling():
            self.mine.x = x

    def take(self) -> Any:
        """Return what was kept, once."""
        # Emptied as it is read: what a failed forward left must not reach the next one.
        x, self.latest = self.latest, None
        if not torch.compiler.is_compiling():
            mine, self.mine.x = getattr(self.mine, "x", None), None
            # A graph that put it has no storage of this thread: then the plain attribute holds it.
            return x if mine is None else mine
        return x

    def look(self) -> Any:
        """Return what was kept, and keep it."""
        return self.latest if torch.compiler.is_compiling() else getattr(self.mine, "x", self.latest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Entered:
        return Entered()

    def __reduce__(self) -> tuple[type[Entered], tuple[()]]:
        return Entered, ()
