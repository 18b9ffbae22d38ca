"""The power of a comparison: the effect detectable with 80 % power, seeds needed, and the gain from pairing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

POWER = 0.8
SLICES = 1000
# the search for a number of seeds ends here, beyond what anybody runs
MOST_SEEDS = 100_000


def detectable_effect(spread: float, pairs: int, critical: float) -> float:
    """Return the mean difference that would have passed |t| > `critical` with a power of 80 %.

    `spread` is the standard deviation of the differences, in the unit of the result; `critical` is the critical |t| of
    the joint test. The power is that of the noncentral t distribution, computed as a mean over the possible sample
    spreads because scipy's own is NaN far from 0.
    """
    from scipy import optimize

    if spread == 0:
        return 0.0

    def shortfall(effect: float) -> float:
        return power_of(effect, pairs, critical) - POWER

    highest = 1.0
    while shortfall(highest) < 0:
        highest *= 2
    return float(optimize.brentq(shortfall, 0.0, highest)) * spread


def power_of(effect: float, pairs: int, critical: float) -> float:
    """Return the probability that |t| exceeds `critical`, for an effect in standard deviations of the differences."""
    from scipy import stats

    spreads, centre = _spreads(pairs), effect * pairs**0.5
    reached = stats.norm.cdf(centre - critical * spreads) + stats.norm.cdf(-centre - critical * spreads)
    return float(reached.mean())


def power_of_sameness(effect: float, margin: float, pairs: int, critical: float) -> float:
    """Return the probability that two one-sided tests show the margin.

    Effect and margin are in standard deviations of the differences.
    """
    import numpy as np
    from scipy import stats

    threshold, root = critical * _spreads(pairs), pairs**0.5
    both = (
        stats.norm.cdf((margin - effect) * root - threshold) + stats.norm.cdf((margin + effect) * root - threshold) - 1
    )
    return float(np.maximum(both, 0.0).mean())


def seeds_needed(power: Callable[[int, float], float], critical: float, pairs: int, least: int) -> int | None:
    """Return the smallest number of seeds, at least `least`, at which `power(pairs, critical)` reaches 80 %.

    None if it exceeds 100,000. `critical` is the critical |t| of a test of `pairs` pairs; for other numbers of pairs it
    is Student's t at the same level.
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
    """Return the midpoints of 1,000 equally likely slices of the ratio of the sample's spread to the true one."""
    import numpy as np
    from scipy import stats

    slices: NDArray[np.float64] = np.sqrt(stats.chi2.ppf((np.arange(SLICES) + 0.5) / SLICES, pairs - 1) / (pairs - 1))
    return slices


def pairing_gain(ours: Sequence[float], base: Sequence[float]) -> float | None:
    """Return the factor by which an unpaired comparison would have needed more seeds for the same error.

    It is the variance of the difference of unpaired runs over that of paired runs; None with fewer than three pairs or
    if all pairs differ by the same amount.
    """
    import numpy as np

    if len(ours) < 3:
        return None
    one, other = np.asarray(ours, dtype=float), np.asarray(base, dtype=float)
    paired = float(np.var(one - other, ddof=1))
    unpaired = float(np.var(one, ddof=1) + np.var(other, ddof=1))
    return None if paired <= 1e-12 * max(unpaired, 1e-300) else unpaired / paired
