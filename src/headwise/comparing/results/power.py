"""Say what a comparison could have seen: the effect found with 80 % power, the margin it is within, and what pairing won."""

from __future__ import annotations

from collections.abc import Sequence

POWER = 0.8
SLICES = 1000


def detectable_effect(spread: float, pairs: int, critical: float, power: float = POWER) -> float:
    """Return the mean difference that would have passed |t| > `critical` with this power.

    `spread` is the standard deviation of the differences, whose unit the result has; `critical` the value of |t| that the joint
    test asked for. The power is that of the noncentral t distribution, as a mean over the spread that a sample may show: scipy's own is NaN far from 0.
    """
    import numpy as np
    from scipy import optimize, stats

    if spread == 0:
        return 0.0
    # the middles of a thousand equally likely slices of the spread
    seen = np.sqrt(stats.chi2.ppf((np.arange(SLICES) + 0.5) / SLICES, pairs - 1) / (pairs - 1))

    def missing(effect: float) -> float:
        centre = effect * pairs**0.5
        reached = stats.norm.cdf(centre - critical * seen) + stats.norm.cdf(-centre - critical * seen)
        return float(reached.mean()) - power

    highest = 1.0
    while missing(highest) < 0:
        highest *= 2
    return float(optimize.brentq(missing, 0.0, highest)) * spread


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
