"""Say within which margin an arm is shown to do nothing: two one-sided tests, jointly for all arms."""

from __future__ import annotations

from typing import NamedTuple

from headwise.results.simultaneous import JointIntervals

ALPHA = 0.05


class Equivalence(NamedTuple):
    """Hold the margin within which the arm is shown to lie, and for a declared margin its p and whether it is
    equivalent."""

    within: float | None
    p: float | None
    equivalent: bool


def equivalence(intervals: JointIntervals, margin: float | None) -> list[Equivalence]:
    """Return, for every arm, what two one-sided tests at 5 % show; `margin` is in the differences' unit, None when none
    is declared.

    Both tests are the joint sign-flip test of the value at the margin, so that the arms declared equivalent are all
    right with 95 %. Schuirmann 1987, doi 10.1007/BF01068419.
    """
    import numpy as np

    bounds = intervals.bounds(2 * ALPHA)
    within = [None if one.low is None or one.high is None else max(abs(one.low), abs(one.high)) for one in bounds]
    if margin is None:
        return [Equivalence(one, None, False) for one in within]
    ends = np.full(len(bounds), margin)
    p = np.maximum(intervals.p(-ends), intervals.p(ends)) / 2
    # a mean outside the margin lies on the other side of its nearer end
    p = np.where(abs(intervals.means) < margin, p, 1 - p)
    return [_declared(one, float(at), margin) for one, at in zip(within, p)]


def _declared(within: float | None, p: float, margin: float) -> Equivalence:
    return Equivalence(within, None if within is None else p, within is not None and within < margin)
