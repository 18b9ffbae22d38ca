"""Take shares for what they are, k of n: quotients in single precision break ties that are exact in counts.

A share is stored as a quotient. Runs of earlier versions stored it in single precision, whose neighbours differ by
6e-8: two sign flips whose sums are equal in counts then differ in the eighth digit. The number n is recovered from the
figures of all runs together: the least whole number over which every one of them is a quotient of whole numbers, to its
own rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST = 1_000_000  # examples, pixels or letters that a share is of
# relative errors of a quotient in double and in single precision; the latter may have been summed over batches
ROUNDINGS = (2.0**-51, 4 * 2.0**-24)
# how likely figures that are no shares may be taken for some
CHANCE = 1e-6


class Whole(NamedTuple):
    """Hold of how many a share is."""

    number: int

    def exact(self, value: float) -> float:
        """Return the share in double precision: a whole number over the number of all."""
        return round(value * self.number) / self.number


def whole_of(values: Sequence[float], rounding: float | None = None) -> Whole | None:
    """Return of how many all `values` are shares, or None where no number is found beyond chance.

    `rounding` is the absolute error of a figure, for differences of shares; None: relative ones, double precision
    first.
    """
    import numpy as np

    seen = np.unique(np.abs(np.asarray(values, dtype=float)))
    seen = seen[np.isfinite(seen) & (seen > 0) & (seen != 1)]
    if not len(seen):
        return Whole(1)
    for relative in ROUNDINGS if rounding is None else (None,):
        errors = np.full(len(seen), rounding) if relative is None else relative * seen
        if found := _least_number(seen, errors):
            return Whole(found)
    return None


def _least_number(seen, errors) -> int | None:  # type: ignore[no-untyped-def]
    import numpy as np

    numbers = np.arange(1, MOST + 1, dtype=float)
    left = numbers
    for value, error in zip(seen, errors):
        parts = left * value
        # the product itself is rounded too
        left = left[np.abs(parts - np.rint(parts)) <= left * error + parts * 2.0**-52]
        if not len(left):
            return None
    least = left[0]
    # any number up to the least one might have fitted by chance
    below = numbers[: int(least)]
    fits = np.minimum(2 * below[:, None] * errors[:64], 1.0).prod(axis=1).sum()
    return int(least) if fits < CHANCE else None
