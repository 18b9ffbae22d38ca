"""When a run has diverged: a loss that is not finite, or a smoothed loss that rose far above its minimum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from headwise_verdict.results import Divergence


class DivergenceRule(Protocol):
    """The settings of a task or script that define when a loss has risen too far."""

    @property
    def divergence_factor(self) -> float | None: ...

    @property
    def divergence_smoothing(self) -> float: ...


@dataclass
class Smoothed:
    """The moving average of the loss over a whole run, which starts at the first loss, and its minimum."""

    mean: float | None = None
    least: float = math.inf

    def first_bad(self, task: DivergenceRule, losses: list[float], step: int) -> Divergence | None:
        """Add the losses of the steps after `step`, counted from 1 over the run; return the first divergence."""
        factor, weight = task.divergence_factor, task.divergence_smoothing
        for at, loss in enumerate(losses, step + 1):
            if not math.isfinite(loss):
                return Divergence(step=at, why="not finite", detail=f"the loss was {loss}")
            if factor is None:
                continue
            self.mean = loss if self.mean is None else weight * self.mean + (1 - weight) * loss
            # a negative loss has no factor over its minimum
            if 0 < factor * self.least < self.mean:
                rose = f"the smoothed loss rose to {self.mean:.4g}, {self.mean / self.least:.3g} times its minimum"
                return Divergence(step=at, why="loss rose", detail=rose)
            self.least = min(self.least, self.mean)
        return None


def in_evaluations(metrics: Mapping[str, Mapping[str, float]], step: int) -> Divergence | None:
    """Return a divergence if the loss of an evaluation is not finite; `metrics` are those of each evaluation."""
    for evaluation, values in metrics.items():
        if not math.isfinite(values.get("loss", 0.0)):
            detail = f"the loss of the evaluation {evaluation!r} was {values['loss']}"
            return Divergence(step=step, why="not finite", detail=detail)
    return None
