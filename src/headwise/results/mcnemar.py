"""Test whether an arm diverges more often than the baseline, exactly and paired by seed."""

from __future__ import annotations

from collections.abc import Sequence


def mcnemar(ours: Sequence[bool], base: Sequence[bool]) -> float:
    """Return the two-sided p of McNemar's exact test: of the seeds in which one of both diverged, as many on either
    side.

    McNemar 1947, doi 10.1007/BF02295996; exact by the binomial distribution.
    """
    from scipy import stats

    only_ours = sum(one and not other for one, other in zip(ours, base, strict=True))
    only_base = sum(other and not one for one, other in zip(ours, base, strict=True))
    return float(stats.binomtest(only_ours, only_ours + only_base).pvalue) if only_ours + only_base else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values corrected for their number by Holm's step-down procedure (Holm 1979), in the given order."""
    order = sorted(range(len(p_values)), key=lambda at: p_values[at])
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, at in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[at]))
        corrected[at] = highest
    return corrected
