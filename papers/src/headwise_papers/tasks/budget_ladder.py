"""The ladder of rates with a few budgets of steps at each rate, so that the steps to a loss are an outcome."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from headwise.study import Metric, Phase
from headwise_papers.tasks.rate_ladder import RateLadder


class BudgetLadder(RateLadder):
    """Training from scratch at each rate for each of a few budgets; the last budget's losses make the ladder.

    Batches and initial weights are the same for all budgets of a seed, and the rate is constant, so that a smaller
    budget is the beginning of a larger one. The steps to the target are the fewest over the rates at which the test
    loss, interpolated linearly between budgets, reaches `target`; the largest budget if it never does.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (
        *RateLadder.metrics,
        Metric("steps_to_target", "steps to the target loss", higher_is_better=False, unit="steps"),
    )

    budgets: tuple[int, ...] = (40, 80)
    target: float = Field(2.6, gt=0, description="test loss in nats per character that must be reached")

    @field_validator("budgets")
    @classmethod
    def _budgets_rise(cls, budgets: tuple[int, ...]) -> tuple[int, ...]:
        if len(budgets) < 2 or list(budgets) != sorted(set(budgets)) or budgets[0] < 1:
            raise ValueError(f"budgets rise, two at least, all above 0; got {budgets}")
        return budgets

    def phases(self) -> list[Phase]:
        """Return a phase for each budget of each rate, each with new weights; the largest is named by its rate."""
        return [
            Phase(self.phase_name(rate, steps), changes={"learning_rate": rate, "steps": steps}, start="fresh")
            for rate in self.rates
            for steps in self.budgets
        ]

    def phase_name(self, rate: float, steps: int) -> str:
        """Return the name of a rate's phase with a budget."""
        return f"rate {rate:g}" if steps == self.budgets[-1] else f"rate {rate:g} for {steps} steps"

    def summary(self, outcomes: dict[str, float]) -> dict[str, float]:
        """Return the summary of the largest budget's ladder, and the fewest steps to the target."""
        losses = {
            rate: [outcomes[f"{self.phase_name(rate, steps)}/test/loss"] for steps in self.budgets]
            for rate in self.rates
        }
        steps = min(steps_to(self.target, self.budgets, own) for own in losses.values())
        return super().summary(outcomes) | {"test/steps_to_target": steps}


def steps_to(target: float, budgets: tuple[int, ...], losses: list[float]) -> float:
    """Return the steps at which a loss reaches a target, linear between budgets; the largest budget if it does not."""
    if losses[0] <= target:
        return float(budgets[0])
    for at in range(len(budgets) - 1):
        high, low = losses[at], losses[at + 1]
        if low <= target:
            return budgets[at] + (high - target) / (high - low) * (budgets[at + 1] - budgets[at])
    return float(budgets[-1])
