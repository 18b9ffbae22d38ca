"""Spikes and waves of the loss: each step's loss against those of earlier steps, without waiting for a device."""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from headwise.health.health_records import Record
from headwise.health.watching.figures import Figures
from headwise.health.watching.weights import OUTSIDE

# The largest and the smallest number of earlier values that a deviation is computed from; OLMo 2 uses 1,000.
WINDOW, FEWEST = 1000, 10


class Spikes:
    """Deviation of each value from the mean of the values before it, in units of their standard deviation.

    OLMo 2 2025 (arXiv 2501.00656) defines a spike as a value at least seven standard deviations away from a rolling
    mean of 1,000 values, and the spike score as the share of such values.

    Attributes:
        LIMIT: the deviation from which on the loss of a step is a spike, unless `Thresholds` says otherwise.
        BOTH: what both of two neighbouring losses must exceed, unless one alone exceeds `LONE`.
    """

    LIMIT, BOTH, LONE = 4.3, 2.0, 9.0

    def __init__(self, window: int = WINDOW, fewest: int = FEWEST) -> None:
        self.before: deque[float] = deque(maxlen=window)
        self.fewest = fewest

    @classmethod
    def of_losses(cls) -> Spikes:
        """Return the deviations of losses from those of exactly fifty steps before."""
        return cls(BEFORE, BEFORE)

    @classmethod
    def lasting(cls, before: float, value: float) -> float:
        """Return the deviation that counts of two neighbouring steps: if both stand out the larger, else the smaller.

        One batch of hard examples is no spike. A loss of two classes, whose tails are heavy, has such batches often,
        and hardly ever two in a row. A fault stays.
        """
        stands = min(before, value) > cls.BOTH or value > cls.LONE
        return max(before, value) if stands else min(before, value)

    def add(self, values: Iterable[float]) -> list[float | None]:
        """Return the deviation of each value, in the order of the values.

        It is None after too few values or after equal ones, and NaN for a value that is not finite. Such a value does
        not count as an earlier value of later ones.
        """
        return [self._next(value) for value in values]

    def _next(self, value: float) -> float | None:
        if not math.isfinite(value):
            return math.nan
        deviation = self._deviation(value)
        self.before.append(value)
        return deviation

    def _deviation(self, value: float) -> float | None:
        count = len(self.before)
        if count < self.fewest:
            return None
        mean = math.fsum(self.before) / count
        spread = math.sqrt(math.fsum((earlier - mean) ** 2 for earlier in self.before) / (count - 1))
        return (value - mean) / spread if spread > 0 else None


LOSS_SPIKE, LOSS_WAVES = "loss_spike", "loss_waves"
# The site of a figure of the whole model.
WHOLE = "model"
# The number of earlier steps that a loss is compared with; fewer give no deviation. The study of the alarms also tried
# 1,000.
BEFORE = 50
NO_LOSS = "no loss was passed to step(): call watch.step(loss)"


# Times that waves rise from half a standard deviation below their trend to half of one above it; a spike rises once.
RISES = 3
# An autocorrelation that fifty independent values, whose own lies within ±0.28, hardly ever have.
TOGETHER = 0.4


def waves(values: Sequence[float]) -> float:
    """Return how much the losses of neighbouring steps move together, as a share of their mean.

    It is the autocorrelation of neighbouring values times their standard deviation about a parabola, divided by their
    mean; 0 where that autocorrelation is below 0.4, where they rise fewer than three times, or where the mean is not
    positive. Shuffled batches differ independently, so that it is near 0; batches sorted by class make waves.
    """
    count, mean = len(values), math.fsum(values) / len(values)
    middle, width = (count - 1) / 2, (count**3 - count) / 12
    # A loss that falls fast bends: about a line that would be a wave.
    line = [at - middle for at in range(count)]
    bend = [at * at - width / count for at in line]
    slope, curvature = (
        math.fsum(map(operator.mul, form, values)) / math.fsum(at * at for at in form) for form in (line, bend)
    )
    off = [value - mean - slope * a - curvature * b for value, a, b in zip(values, line, bend, strict=True)]
    squares = math.fsum(value * value for value in off)
    spread = math.sqrt(squares / count)
    if mean <= 0 or spread == 0 or _rises(off, spread / 2) < RISES:
        return 0.0
    together = math.fsum(here * after for here, after in pairwise(off)) / squares
    return together * spread / mean if together >= TOGETHER else 0.0


def _rises(values: Sequence[float], above: float) -> int:
    """Return how many times values rise from below -`above` to above it."""
    rises, low = 0, False
    for value in values:
        if value < -above:
            low = True
        elif low and value > above:
            rises, low = rises + 1, False
    return rises


class LossFigures:
    """The figures of each loss, from the fifty losses before: `loss_spike`, and `loss_waves` if asked."""

    def __init__(self, with_waves: bool = True) -> None:
        self._spikes, self._with_waves = Spikes.of_losses(), with_waves

    def next(self, step: int, value: float) -> list[Record]:
        """Return the records of a step; a loss that is not finite has only a deviation, which is NaN."""
        deviation = self._spikes.add([value])[0]
        if deviation is None:
            return []
        figures = {LOSS_SPIKE: deviation}
        if self._with_waves and math.isfinite(deviation):
            figures[LOSS_WAVES] = waves(self._spikes.before)
        place = {"site": WHOLE, "depth": OUTSIDE, "head": None, "step": step}
        return [cast(Record, {**place, "statistic": name, "value": number}) for name, number in figures.items()]


class Losses:
    """Figures of the losses of a training, from the fifty losses before each.

    A loss on CUDA is copied while the training continues, and is known a step or two later; a loss on another device is
    known when a step is read.
    """

    def __init__(self, with_waves: bool = True) -> None:
        self.given = False
        self._figures = LossFigures(with_waves)
        # The step, the loss, and the CUDA event that ends its copy, or None without one.
        self._coming: deque[tuple[int, Tensor | float, Any]] = deque()
        self._since: list[float] = []

    def add(self, step: int, loss: Tensor | float) -> None:
        """Add the loss of a step.

        Raises:
            ValueError: if a tensor has more or fewer than one element.
        """
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ValueError(
                f"watch.step(loss) takes one number, got a tensor of shape {tuple(loss.shape)}: pass the mean"
            )
        self.given = True
        value = loss.detach() if isinstance(loss, Tensor) else float(loss)
        event: Any = None
        if isinstance(value, Tensor) and value.device.type == "cuda":
            event = torch.cuda.Event()
            value = value.to("cpu", non_blocking=True)
            event.record()
        elif isinstance(value, Tensor):
            # The training may overwrite it.
            value = value.clone()
        self._coming.append((step, value, event))

    def known(self, wait: bool) -> list[Record]:
        """Return the records of each loss that has become known since the last call; `wait` for those that are not on
        the CPU yet."""
        records: list[Record] = []
        while self._coming and (wait or _arrived(*self._coming[0][1:])):
            step, value, event = self._coming.popleft()
            if event is not None:
                event.synchronize()
            new = self._figures.next(step, float(value))
            self._since += [record["value"] for record in new if record["statistic"] == LOSS_SPIKE]
            records += new
        return records

    def largest(self, step: int) -> list[Figures]:
        """Return the largest deviation since the last reading as a figure of `step`; an empty list without any."""
        values, self._since = self._since, []
        return Figures.largest(WHOLE, OUTSIDE, step, LOSS_SPIKE, values)


def _arrived(value: Tensor | float, event: Any) -> bool:
    if event is not None:
        return bool(event.query())
    return not isinstance(value, Tensor) or value.device.type == "cpu"
