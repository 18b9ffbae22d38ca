"""Recover the exact shares k/n from stored quotients, whose rounding would break ties between equal counts.

Runs of earlier versions stored shares in single precision, with a spacing of 6e-8: two sign flips whose sums are equal
in counts then differ in the eighth digit. The number n is recovered from the figures of all runs together: it is the
smallest whole number of which every figure, to its own rounding, is a whole multiple of 1/n.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST = 1_000_000  # the largest n (examples, pixels or letters) that is tried
# relative errors of a quotient in double and single precision; in single it may have been summed over batches
ROUNDINGS = (2.0**-51, 4 * 2.0**-24)
# largest probability of taking figures that are not shares for shares
CHANCE = 1e-6


class Whole(NamedTuple):
    """The number n of which a share is a part."""

    number: int

    def exact(self, value: float) -> float:
        """Return the share in double precision, as a whole number divided by n."""
        return round(value * self.number) / self.number


def whole_of(values: Sequence[float], rounding: float | None = None) -> Whole | None:
    """Return the number of which all `values` are shares, or None if the smallest that fits could fit by chance.

    `rounding` is the absolute error of a figure, for differences of shares; with None, relative errors are tried,
    those of double precision first.
    """
    import numpy as np

    shares = np.unique(np.abs(np.asarray(values, dtype=float)))
    shares = shares[np.isfinite(shares) & (shares > 0) & (shares != 1)]
    if not len(shares):
        return Whole(1)
    for relative in ROUNDINGS if rounding is None else (None,):
        errors = np.full(len(shares), rounding) if relative is None else relative * shares
        if number := _least_number(shares, errors):
            return Whole(number)
    return None


def _least_number(shares, errors) -> int | None:  # type: ignore[no-untyped-def]
    import numpy as np

    numbers = np.arange(1, MOST + 1, dtype=float)
    left = numbers
    for value, error in zip(shares, errors):
        products = left * value
        # the product is rounded as well
        left = left[np.abs(products - np.rint(products)) <= left * error + products * 2.0**-52]
        if not len(left):
            return None
    least = left[0]
    # the probability that some number up to the smallest fits by chance
    below = numbers[: int(least)]
    fits = np.minimum(2 * below[:, None] * errors[:64], 1.0).prod(axis=1).sum()
    return int(least) if fits < CHANCE else None
