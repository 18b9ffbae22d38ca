"""The ends of scales: no mean of shares, and no difference of two, lies beyond what shares can have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from headwise_verdict.results.records import Outcome

# of rounding alone, a share of all may exceed 1
ROUNDING = 1e-6


class Scale(NamedTuple):
    """The smallest and the largest value that a figure can have."""

    low: float = float("-inf")
    high: float = float("inf")

    def minus(self, other: Scale) -> Scale:
        """Return the scale of the difference of a figure of this scale and one of another."""
        return Scale(self.low - other.high, self.high - other.low)

    def clipped(self, mean: float | None, low: float | None, high: float | None) -> tuple[float | None, float | None]:
        """Return the ends of an interval on this scale, with its mean inside whatever its rounding."""
        if mean is None or low is None or high is None:
            return low, high
        return min(mean, max(self.low, low)), max(mean, min(self.high, high))


ENDLESS = Scale()


def scale_of(outcome: Outcome, figures: Iterable[float | None]) -> Scale:
    """Return the scale of an outcome: [0, 1] of shares, [−1, 1] of their gaps, without ends of anything else.

    A figure beyond these ends, such as an error rate of words above 1, shows that it is no share.
    """
    if outcome.unit != "%":
        return ENDLESS
    ends = Scale(-1.0 if outcome.kind == "gap" else 0.0, 1.0)
    known = [figure for figure in figures if figure is not None]
    return ends if all(ends.low - ROUNDING <= one <= ends.high + ROUNDING for one in known) else ENDLESS
