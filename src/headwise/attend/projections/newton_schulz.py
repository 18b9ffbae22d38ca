"""Cubics of Newton-Schulz iterations, which set singular values to 1 by matrix products alone."""

from __future__ import annotations

import math


def cubics(least: float, error: float = 1e-9) -> tuple[float, ...]:
    """Return the factors ρ of the cubics 3/2·ρx - 1/2·(ρx)³ that map [least, 1] to 1, each optimal after the last.

    Iterated in turn, they leave everything above `least` within `error` of 1.
    """
    factors = []
    while 1 - least > error:
        # The optimal cubic maps 1 and `least` to the same value. Below √3, rounding cannot map 1 to a negative value.
        factors.append(min(1.7, math.sqrt(3 / (1 + least + least * least))))
        scaled = factors[-1] * least
        least = 1.5 * scaled - 0.5 * scaled**3
    return tuple(factors)
