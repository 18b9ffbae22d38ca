"""The engine of this process, one run after the other: for `accelerate launch`, where a run spans all processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from headwise.engines.worker import carry_out
from headwise.training.job import Order


class HereEngine:
    """An engine in this process; every process of a distributed launch carries out the same runs in the same order."""

    parallel = False
    rehearses = True

    def __init__(self) -> None:
        self._waiting: deque[Order] = deque()

    def submit(self, order: Order) -> None:
        """Queue one run."""
        self._waiting.append(order)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield events until no run is waiting."""
        while self._waiting:
            order = self._waiting.popleft()
            events: list[dict[str, Any]] = []
            last = carry_out(order, events.append)
            notes = [event for event in events if event["event"] == "note"]
            yield from ({**event, "run": order.identity} for event in (*notes, last))

    def close(self) -> None:
        """Drop the runs that have not started."""
        self._waiting.clear()
