"""Runs in this process, one after the other: for `accelerate launch`, where each run spans all processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from headwise.engines.worker import carry_out
from headwise.training.job import Order


class HereEngine:
    """Carry out orders in this process; every process of a distributed launch does the same ones in the same order."""

    parallel = False
    rehearses = True

    def __init__(self) -> None:
        self._waiting: deque[Order] = deque()

    def submit(self, order: Order) -> None:
        """Queue one run."""
        self._waiting.append(order)

    def events(self) -> Iterator[dict[str, Any]]:
        """Return events until no run is waiting."""
        while self._waiting:
            order = self._waiting.popleft()
            told: list[dict[str, Any]] = []
            last = carry_out(order, told.append)
            notes = [event for event in told if event["event"] == "note"]
            yield from ({**event, "run": order.identity} for event in (*notes, last))

    def close(self) -> None:
        """Forget the runs that were not begun."""
        self._waiting.clear()
