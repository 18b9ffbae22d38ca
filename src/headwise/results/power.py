"""Say what a comparison could have seen: the effect found with 80 % power, the margin it is within, and what pairing
won."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

POWER = 0.8
SLICES = 1000
# more seeds than anybody runs: beyond, a number of seeds says nothing
MOST_SEEDS = 100_000


def detectable_effect(spread: float, pairs: int, critical: float) -> float:
    """Return the mean difference that would have passed |t| > `critical` with a power of 80 %.

    `spread` is the standard deviation of the differences, whose unit the result has; `critical` the value of |t| that
    the joint test asked for. The power is that of the noncentral t distribution, as a mean over the spread that a
    sample may show: scipy's own is NaN far from 0.
    """
    from scipy import optimize

    if spread == 0:
        return 0.0

    def missing(effect: float) -> float:
        return power_of(effect, pairs, critical) - POWER

    highest = 1.0
    while missing(highest) < 0:
        highest *= 2
    return float(optimize.brentq(missing, 0.0, highest)) * spread


def power_of(effect: float, pairs: int, critical: float) -> float:
    """Return the chance that |t| exceeds `critical`, for an effect in standard deviations of the differences."""
    from scipy import stats

    seen, centre = _spreads(pairs), effect * pairs**0.5
    reached = stats.norm.cdf(centre - critical * seen) + stats.norm.cdf(-centre - critical * seen)
    return float(reached.mean())


def power_of_sameness(effect: float, margin: float, pairs: int, critical: float) -> float:
    """Return the chance that two one-sided tests show the margin; effect and margin in standard deviations of the
    differences."""
    import numpy as np
    from scipy import stats

    seen, root = critical * _spreads(pairs), pairs**0.5
    both = stats.norm.cdf((margin - effect) * root - seen) + stats.norm.cdf((margin + effect) * root - seen) - 1
    return float(np.maximum(both, 0.0).mean())


def seeds_needed(power: Callable[[int, float], float], critical: float, pairs: int, least: int) -> int | None:
    """Return the least number of seeds, from `least` on, at which `power(pairs, critical)` reaches 80 %; None beyond
    100,000.

    `critical` is the |t| that a test of `pairs` pairs asked for; with other numbers it is Student's at the same level.
    """
    from scipy import stats

    level = stats.t.sf(critical, pairs - 1)

    def enough(seeds: int) -> bool:
        return power(seeds, float(stats.t.isf(level, seeds - 1))) >= POWER

    low, high = max(least, 2) - 1, max(least, 2)
    while not enough(high):
        low, high = high, 2 * high
        if low > MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


@lru_cache(maxsize=256)
def _spreads(pairs: int) -> NDArray[np.float64]:
    """Return the middles of a thousand equally likely slices of the spread that a sample shows, over the true one."""
    import numpy as np
    from scipy import stats

    slices: NDArray[np.float64] = np.sqrt(stats.chi2.ppf((np.arange(SLICES) + 0.5) / SLICES, pairs - 1) / (pairs - 1))
    return slices


def pairing_gain(ours: Sequence[float], base: Sequence[float]) -> float | None:
    """Return how many times as many seeds an unpaired comparison would have needed for the same error.

    It is the variance of the difference of unpaired runs over that of the pairs; None when that cannot be told, from
    fewer than three pairs or pairs that all differ by the same.
    """
    import numpy as np

    if len(ours) < 3:
        return None
    one, other = np.asarray(ours, dtype=float), np.asarray(base, dtype=float)
    paired = float(np.var(one - other, ddof=1))
    unpaired = float(np.var(one, ddof=1) + np.var(other, ddof=1))
    return None if paired <= 1e-12 * max(unpaired, 1e-300) else unpaired / paired
