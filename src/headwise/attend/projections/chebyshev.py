"""Chebyshev polynomials that tell whether a matrix has a singular value above a limit: their degrees and bounds."""

from __future__ import annotations

import math

# Vectors of a block, and by what share a singular value that stays may be above the limit. The first filter asks
# whether anything is above the share QUICK of it, by a few products.
BLOCK, ABOVE, QUICK = 16, 0.02, 0.7


def steps_of(columns: int) -> tuple[int, int, float, float]:
    """Return the degrees of the first filter and of the others, and the norms below which nothing is above the limit.

    A Gaussian vector has next to no component in a given direction with a small probability: all of K components are
    below √(π/2) / 4 with one of 4^-K, 2e-10. The degrees are such that eight times the norm of a block in which nothing
    grows is below the bound, so that many singular values just above the limit do not hide that nothing is far above.
    """
    unseen, norm = 4 * math.sqrt(2 / math.pi), math.sqrt(columns)
    edges = (1 + ABOVE) ** 2 / QUICK**2, (1 + ABOVE) ** 2
    rates = [math.acosh(2 * edge - 1) for edge in edges]
    degrees = [math.ceil(math.acosh(unseen * c * norm) / rate) for c, rate in zip((2.8, 8), rates, strict=True)]
    bounds = [math.cosh(degree * rate) / unseen for degree, rate in zip(degrees, rates, strict=True)]
    return (*degrees, *bounds)  # type: ignore[return-value]  # two of each
