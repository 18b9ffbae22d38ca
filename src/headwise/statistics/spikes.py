"""Spikes: how far a number of every step, such as the loss, lies above those before it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

# values that a deviation is told from, at most and at least: OLMo 2 takes the last thousand
WINDOW, FEWEST = 1000, 10


class Spikes:
    """Gives each value's deviation from the mean of the values before it, in their standard deviations.

    OLMo 2 2025 (arXiv 2501.00656) calls a value a spike that lies seven of these away from a rolling mean of 1,000
    values, and the share of such values the spike score.

    Args:
        window: how many values before are looked at.
        fewest: how many there must be.
    """

    def __init__(self, window: int = WINDOW, fewest: int = FEWEST) -> None:
        self.before: deque[float] = deque(maxlen=window)
        self.fewest = fewest

    def add(self, values: Iterable[float]) -> list[float | None]:
        """Return the deviation of each value, in its order.

        None where too few values came before or none of them differs; NaN of a value that is not finite, which
        is not counted among those before.
        """
        return [self._next(value) for value in values]

    def _next(self, value: float) -> float | None:
        if not math.isfinite(value):
            return math.nan
        found = self._deviation(value)
        self.before.append(value)
        return found

    def _deviation(self, value: float) -> float | None:
        count = len(self.before)
        if count < self.fewest:
            return None
        mean = math.fsum(self.before) / count
        spread = math.sqrt(math.fsum((one - mean) ** 2 for one in self.before) / (count - 1))
        return (value - mean) / spread if spread > 0 else None
