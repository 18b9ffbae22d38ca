"""How fast and how evenly the loss of a training falls: the steps to a goal, and the spikes."""

from __future__ import annotations

import math
from typing import Any

from headwise.health import Spikes
from headwise_verdict.results import OutcomeNames

# spikes are counted in this many steps
STEPS = 1000


class Course:
    """The smoothed training loss of a phase until it reaches a goal, and the number of its spikes.

    A run that does not reach the goal counts as one step more than it has, so only runs of equally many steps compare.
    A spike is a loss that exceeds the mean of the fifty losses before by `Spikes.LIMIT` of their standard deviations.

    Args:
        goal: the training loss to reach.
        smoothing: the weight of the past in the smoothed loss, in [0, 1).
    """

    def __init__(self, goal: float, smoothing: float) -> None:
        self.goal, self.smoothing = goal, smoothing
        self.steps, self.spikes = 0, 0
        self.mean: float | None = None
        self.reached: int | None = None
        self._deviations = Spikes.of_losses()

    def add(self, losses: list[float]) -> None:
        """Add the losses of the next steps."""
        for loss, deviation in zip(losses, self._deviations.add(losses), strict=True):
            self.steps += 1
            self.mean = loss if self.mean is None else self.smoothing * self.mean + (1 - self.smoothing) * loss
            if self.reached is None and self.mean <= self.goal:
                self.reached = self.steps
            # NaN, of a loss that is not finite, is above nothing
            self.spikes += deviation is not None and deviation > Spikes.LIMIT

    def outcomes(self) -> dict[str, float]:
        """Return the steps to the goal, one more than all steps if it was not reached, and the spikes in 1,000 steps
        that have fifty before them; the latter only if there are such steps."""
        outcomes = {OutcomeNames.STEPS_TO_GOAL: float(self.reached or self.steps + 1)}
        judged = self.steps - self._deviations.fewest
        return outcomes | ({OutcomeNames.SPIKES: STEPS * self.spikes / judged} if judged > 0 else {})

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores."""
        before = [loss for loss in self._deviations.before if math.isfinite(loss)]
        parts = {"steps": self.steps, "spikes": self.spikes, "mean": self.mean, "reached": self.reached}
        return parts | {"before": before}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the `state()` of an earlier process."""
        self.steps, self.spikes = state["steps"], state["spikes"]
        self.mean, self.reached = state["mean"], state["reached"]
        self._deviations.before.extend(state["before"])
