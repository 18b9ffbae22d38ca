"""Held keys: the keys of a step's draws in a tensor of the device, so that each replay of a captured step draws others.

A CUDA graph repeats kernels with the arguments that they had when it was captured, the keys of draws among them. A key
that is read from memory can be changed between two replays. The passes of a step, and so their keys, are known from the
step before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from headwise.borders import without_modes


class Counted(Protocol):
    """The counter of the passes through one layer."""

    number: int
    held: Any

    def count(self) -> int:
        """Return the number of passes so far."""

    def recount(self, count: int) -> None:
        """Set the number of passes so far."""

    def next_key(self, ahead: int = 0) -> int:
        """Return the key of the next pass, or of one `ahead` of it."""


class HeldKeys:
    """The passes of one training step in their order, and a tensor that holds the keys of their draws.

    Attributes:
        order: the counter of each pass of the step, in the order of the passes.
        table: the keys, int64 (passes,); None until `write` is called.
    """

    def __init__(self, counters: Iterable[Counted]) -> None:
        self.counters = list(counters)
        self.order: list[Counted] = []
        self.table: Tensor | None = None
        self._next: int | None = None

    @contextmanager
    def listing(self) -> Iterator[None]:
        """List the passes of the step that runs inside; their keys are numbers, as in any other step."""
        self.order, self._next = [], None
        with self._in_place():
            yield

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hand the keys of the table to the passes of the step that runs inside.

        Raises:
            RuntimeError: if the step has other passes than the one that was listed.
        """
        self._next = 0
        with self._in_place():
            yield
        self._check(self._next == len(self.order))

    def write(self, device: torch.device) -> None:
        """Write the keys of the next step into the table."""
        ahead: Counter[int] = Counter()
        keys = []
        for passes in self.order:
            keys.append(passes.next_key(ahead[passes.number]))
            ahead[passes.number] += 1
        written = torch.tensor(keys, dtype=torch.int64)
        if self.table is None or len(self.table) != len(keys):
            self.table = written.to(device)
        else:
            self.table.copy_(written)

    def count(self) -> None:
        """Count the passes of a step that was replayed, and so ran no Python."""
        for passes in self.order:
            passes.recount(passes.count() + 1)

    def counted(self, passes: Counted) -> int | Tensor:
        """Count a pass and return its key."""
        with without_modes():
            if self._next is None:
                key = passes.next_key()
                passes.recount(passes.count() + 1)
                self.order.append(passes)
                return key
            passes.recount(passes.count() + 1)
            assert self.table is not None
            self._check(self._next < len(self.order) and self.order[self._next] is passes)
            self._next += 1
            return self.table[self._next - 1]

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        for passes in self.counters:
            passes.held = self
        try:
            yield
        finally:
            for passes in self.counters:
                passes.held = None

    def _check(self, same: bool) -> None:
        if not same:
            raise RuntimeError(
                "a training step passed through other layers than the step before, so that it cannot be captured as a "
                "CUDA graph: use --graphs off"
            )
