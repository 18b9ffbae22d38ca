"""Losses: how far the loss of each step lies above those of the steps before, without waiting for a device."""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any

import torch
from torch import Tensor

from headwise.files.health_records import Record
from headwise.statistics.spikes import Spikes
from headwise.watching.figures import Figures
from headwise.watching.matrices import OUTSIDE

LOSS_SPIKE = "loss_spike"
# The site of a figure of the whole model.
WHOLE = "model"
# Steps that a loss is held against, all of which there must be; the study of the alarms compared it with a thousand.
BEFORE = 50
NO_LOSS = "no loss was given to step(): watch.step(loss)"


class Losses:
    """Gives each loss's deviation from those of the fifty steps before, in their standard deviations, once it is on the
    CPU.

    A loss on CUDA travels while the training goes on, and is known a step or two later; one on another device is known
    when a step is read.
    """

    def __init__(self) -> None:
        self.given = False
        self._spikes = Spikes(BEFORE, BEFORE)
        # step, loss, and what tells whether it has come: an event of CUDA, or None
        self._coming: deque[tuple[int, Tensor | float, Any]] = deque()
        self._since: list[float] = []

    def add(self, step: int, loss: Tensor | float) -> None:
        """Take the loss of a step.

        Raises:
            ValueError: where it is not one number.
        """
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ValueError(f"watch.step(loss) takes one number, got a tensor of shape {tuple(loss.shape)}")
        self.given = True
        value = loss.detach() if isinstance(loss, Tensor) else float(loss)
        event: Any = None
        if isinstance(value, Tensor) and value.device.type == "cuda":
            event = torch.cuda.Event()
            value = value.to("cpu", non_blocking=True)
            event.record()
        elif isinstance(value, Tensor):
            # an optimizer or a loop may write over it
            value = value.clone()
        self._coming.append((step, value, event))

    def known(self, wait: bool) -> list[Record]:
        """Return the deviations of the losses that came since the last call.

        Args:
            wait: for those that are still on their way.
        """
        found: list[Record] = []
        while self._coming and (wait or _came(*self._coming[0][1:])):
            step, value, event = self._coming.popleft()
            if event is not None:
                event.synchronize()
            deviation = self._spikes.add([float(value)])[0]
            if deviation is not None:
                self._since.append(deviation)
                found.append(
                    {
                        "site": WHOLE,
                        "depth": OUTSIDE,
                        "head": None,
                        "step": step,
                        "statistic": LOSS_SPIKE,
                        "value": deviation,
                    }
                )
        return found

    def largest(self, step: int) -> list[Figures]:
        """Return the largest deviation since the last reading as a figure of this one."""
        values, self._since = self._since, []
        if not values:
            return []
        largest = next((one for one in values if one != one), max(values))
        return [Figures(WHOLE, OUTSIDE, step, LOSS_SPIKE, "layer", array("d", [largest]), None, False)]


def _came(value: Tensor | float, event: Any) -> bool:
    if event is not None:
        return bool(event.query())
    return not isinstance(value, Tensor) or value.device.type == "cpu"
