"""Evidence about a mean of bounded differences, whatever their distribution: bets on them, after every pair.

The differences d of the pairs lie within ±B, and that is all. If their mean, given those before, is at most m, then

    w_n(c) = Π (1 - c + c·(d_i + B) / (m + B)),  0 ≤ c < 1

is the wealth of one who stakes the share c of it on each being higher. It ever reaches w with a probability of at most
1/w (Ville). The evidence is the mean of w_n(c) over shares c that are spread as Beta(1/2, 1/2), the universal portfolio
(Cover and Ordentlich 1996; Orabona and Jun 2021, arXiv 2110.14099; Waudby-Smith and Ramdas 2023, arXiv 2010.09686). It
falls as m grows: all m against which neither side's evidence has reached 2/α are the confidence sequence.

The differences need be neither normal nor symmetric nor of one distribution. The price is pairs: fewer cannot exclude
rare bad runs of size B.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from headwise_verdict.files.errors import StudyError

# eight shares of the wealth, equally probable under Beta(1/2, 1/2)
SHARES = tuple(math.sin(math.pi * (2 * k + 1) / 32) ** 2 for k in range(8))
# halvings when an end of the interval is sought: to a ten-millionth of where it lay
HALVINGS = 24


class Bets:
    """The bets on differences so far, and the interval that they leave.

    Args:
        bound: largest size of a difference, in the unit of the metric.
        alpha: probability that the interval ever excludes the mean.

    Attributes:
        low, high: the confidence sequence; what one look has excluded stays excluded.
        evidence: largest e-value so far against a mean of zero; it reaches 1/alpha with probability alpha at most.
    """

    def __init__(self, bound: float, alpha: float) -> None:
        self.bound, self.reached = bound, math.log(2 / alpha)
        self.low, self.high, self.evidence = -bound, bound, 0.5
        self.seen: list[float] = []

    def add(self, difference: float) -> None:
        """Look at one more difference.

        Raises:
            StudyError: if it is larger than the bound, which then does not hold.
        """
        if not abs(difference) <= self.bound:
            raise StudyError(
                f"pair {len(self.seen) + 1} differs by {difference:.6g}, more than the bound {self.bound:g}, "
                "which is too small. Take the whole range of the metric, and fix it before the first run."
            )
        self.seen.append(difference)
        turned = [-d for d in self.seen]
        mean = math.fsum(self.seen) / len(self.seen)
        low, high = self._end(self.seen, self.low, mean), -self._end(turned, -self.high, -mean)
        if low > high:
            # looks exclude each other, which has probability alpha: the last one alone
            low, high = self._end(self.seen, -self.bound, mean), -self._end(turned, -self.bound, -mean)
        self.low, self.high = low, high
        found = max(_mean(self.logs(0.0)), _mean(self.logs(0.0, up=False)))
        self.evidence = max(self.evidence, math.exp(min(found, 700.0)) / 2)

    def logs(self, null: float, *, up: bool = True) -> list[float]:
        """Return the logarithm of each share's wealth if the mean is at most `null`; not up: at least."""
        return _logs(self.seen if up else [-d for d in self.seen], self.bound, null if up else -null)

    def more(self, null: float, most: int, *, up: bool = True) -> int:
        """Return the further pairs, like those before, that exclude a mean of at most `null`; `most` if none do."""
        logs = self.logs(null, up=up)

        # wealth is convex in the pairs: once it has reached what excludes, it stays
        def excludes(more: int) -> bool:
            grown = 1 + more / len(self.seen)
            return _mean([grown * log for log in logs]) >= self.reached

        return bisect_left(range(1, most), True, key=excludes) + 1

    def _end(self, differences: Sequence[float], low: float, mean: float) -> float:
        """Return the lower end of the interval, which is at least the one before."""
        if low >= mean or (low > -self.bound and _mean(_logs(differences, self.bound, low)) < self.reached):
            return low
        # evidence against the mean of the differences themselves is at most 1
        high = mean
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if _mean(_logs(differences, self.bound, middle)) >= self.reached:
                low = middle
            else:
                high = middle
        return low


def _logs(differences: Sequence[float], bound: float, null: float) -> list[float]:
    prices = [(d + bound) / (null + bound) for d in differences]
    return [math.fsum(math.log(1 - share + share * price) for price in prices) for share in SHARES]


def _mean(logs: Sequence[float]) -> float:
    """Return the logarithm of the mean wealth."""
    most = max(logs)
    return most + math.log(math.fsum(math.exp(log - most) for log in logs) / len(logs))
