"""Return the interval of a mean over seeds, or of a share of them."""

from __future__ import annotations

from collections.abc import Sequence

from headwise.results.analysis_record import Interval

ALPHA = 0.05
BOOTSTRAP_FROM = 20  # values; the percentile bootstrap of 5 values covers 84 %, so fewer get Student's t


def interval(values: Sequence[float], *, bootstrap_from: float = BOOTSTRAP_FROM) -> Interval:
    """Return the mean of `values` with its 95 % interval: Student's t below `bootstrap_from` values, the BCa bootstrap
    from there.

    One value has no interval (None); none has no mean either.
    """
    import numpy as np
    from scipy import stats

    array = np.asarray(values, dtype=float)
    if array.size < 2:
        return Interval(mean=float(array[0]) if array.size else None, n=int(array.size))
    mean, n = float(array.mean()), int(array.size)
    # a spread of rounding alone is none, and the bootstrap of it is undefined
    if np.ptp(array) <= 1e-12 * np.abs(array).max():
        return Interval(mean=mean, low=mean, high=mean, n=n, how="all values are equal")
    if n < bootstrap_from:
        half = float(stats.t.ppf(1 - ALPHA / 2, n - 1) * array.std(ddof=1) / np.sqrt(n))
        return Interval(mean=mean, low=mean - half, high=mean + half, n=n, how="Student's t")
    rng = np.random.default_rng(0)
    drawn = stats.bootstrap((array,), np.mean, n_resamples=9_999, confidence_level=1 - ALPHA, method="BCa", rng=rng)
    low, high = map(float, drawn.confidence_interval)
    return Interval(mean=mean, low=low, high=high, n=n, how="BCa bootstrap, 9,999 draws")


def share(values: Sequence[float]) -> Interval:
    """Return the mean of values that are 0 or 1 with the exact 95 % interval of Clopper and Pearson (1934)."""
    from scipy import stats

    if not values:
        return Interval(mean=None, n=0)
    found = stats.binomtest(round(sum(values)), len(values)).proportion_ci(1 - ALPHA, "exact")
    mean = sum(values) / len(values)
    return Interval(mean=mean, low=float(found.low), high=float(found.high), n=len(values), how="Clopper and Pearson")
