"""Confidence intervals of a mean or share over seeds, joint (max-T) ones of differences, and the ends of scales."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from headwise_verdict.results.analysis_record import Interval
from headwise_verdict.results.joint_flips import ROUNDING, competing, flips, scores, seeds_for_a_verdict, t_of
from headwise_verdict.results.joint_flips import smallest_p as smallest_p_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headwise_verdict.results.joint_flips import Table
    from headwise_verdict.results.records import Outcome

# of rounding alone, a share of all may exceed 1
BEYOND = 1e-6


class Scale(NamedTuple):
    """The smallest and the largest value that a figure can have."""

    low: float = float("-inf")
    high: float = float("inf")

    def minus(self, other: Scale) -> Scale:
        """Return the scale of the difference of a figure of this scale and one of another."""
        return Scale(self.low - other.high, self.high - other.low)

    def clipped(self, mean: float | None, low: float | None, high: float | None) -> tuple[float | None, float | None]:
        """Return the ends of an interval on this scale, with its mean inside whatever its rounding."""
        if mean is None or low is None or high is None:
            return low, high
        return min(mean, max(self.low, low)), max(mean, min(self.high, high))


ENDLESS = Scale()


def scale_of(outcome: Outcome, figures: Iterable[float | None]) -> Scale:
    """Return the scale of an outcome: [0, 1] of shares, [−1, 1] of their gaps, without ends of anything else.

    A figure beyond these ends, such as an error rate of words above 1, shows that it is no share.
    """
    if outcome.unit != "%":
        return ENDLESS
    ends = Scale(-1.0 if outcome.kind == "gap" else 0.0, 1.0)
    known = [figure for figure in figures if figure is not None]
    return ends if all(ends.low - BEYOND <= one <= ends.high + BEYOND for one in known) else ENDLESS


ALPHA = 0.05
BOOTSTRAP_FROM = 20  # values; with fewer Student's t is used, as the percentile bootstrap of 5 values covers only 84 %


def interval(values: Sequence[float], *, bootstrap_from: float = BOOTSTRAP_FROM) -> Interval:
    """Return the mean of `values` with its 95 % interval.

    The interval is Student's t for fewer than `bootstrap_from` values, else the BCa bootstrap. A single value has no
    interval (None), an empty sequence no mean either.
    """
    import numpy as np
    from scipy import stats

    array = np.asarray(values, dtype=float)
    if array.size < 2:
        return Interval(mean=float(array[0]) if array.size else None, n=int(array.size))
    mean, n = float(array.mean()), int(array.size)
    # a spread due to rounding counts as none: its bootstrap is undefined
    if np.ptp(array) <= 1e-12 * np.abs(array).max():
        return Interval(mean=mean, low=mean, high=mean, n=n, how="all values are equal")
    if n < bootstrap_from:
        half = float(stats.t.ppf(1 - ALPHA / 2, n - 1) * array.std(ddof=1) / np.sqrt(n))
        return Interval(mean=mean, low=mean - half, high=mean + half, n=n, how="Student's t")
    rng = np.random.default_rng(0)
    bootstrap = stats.bootstrap((array,), np.mean, n_resamples=9_999, confidence_level=1 - ALPHA, method="BCa", rng=rng)
    low, high = map(float, bootstrap.confidence_interval)
    return Interval(mean=mean, low=low, high=high, n=n, how="BCa bootstrap, 9,999 draws")


def share(values: Sequence[float]) -> Interval:
    """Return the mean of values that are 0 or 1 with the exact 95 % interval of Clopper and Pearson (1934)."""
    from scipy import stats

    if not values:
        return Interval(mean=None, n=0)
    limits = stats.binomtest(round(sum(values)), len(values)).proportion_ci(1 - ALPHA, "exact")
    mean = sum(values) / len(values)
    return Interval(mean=mean, low=float(limits.low), high=float(limits.high), n=len(values), how="Clopper and Pearson")


EXACT_UP_TO = 11  # pairs; an interval takes many rounds of flips, and this number is precise enough for its ends
RESAMPLES = 2047
ROUNDS = 28  # of halving: eight digits


class Bounds(NamedTuple):
    """Both ends of an interval (None with fewer than two pairs) and the name of the method of their computation."""

    low: float | None
    high: float | None
    how: str


def smallest_p(pairs: int) -> float:
    """Return the smallest two-sided p that this number of pairs can give a verdict, whatever the number of arms."""
    return max(smallest_p_of(pairs), 0.0 if pairs <= EXACT_UP_TO else 1 / (RESAMPLES + 1))


class JointIntervals:
    """Simultaneous intervals of the columns of a table of differences (seeds × arms, NaN where a pair is missing)."""

    def __init__(self, differences: Table) -> None:
        import numpy as np

        table = np.asarray(differences, dtype=float)
        table = table[np.isfinite(table).any(axis=1)] if table.size else table
        present = np.isfinite(table)
        self.pairs: NDArray[np.int64] = present.sum(axis=0)
        self._values = np.nan_to_num(table)
        self.means = self._values.sum(axis=0) / np.maximum(self.pairs, 1)
        centred = np.where(present, self._values - self.means, 0.0)
        self._squares = (centred**2).sum(axis=0)
        signs = flips(len(table), exact_up_to=EXACT_UP_TO, resamples=RESAMPLES).signs
        self._centred = signs @ centred
        self._counts = signs @ present.astype(float)
        rivals = competing(self.pairs, seeds_for_a_verdict(ALPHA))
        self._others = _largest_of_the_others(rivals * scores(self._centred, self._squares, self.pairs))

    def errors(self) -> NDArray[np.float64]:
        """Return the standard error of each arm's mean difference."""
        import numpy as np

        degrees = np.maximum(self.pairs - 1, 1)
        return np.sqrt(self._squares / degrees / np.maximum(self.pairs, 1))

    def p(self, values: Table) -> Table:
        """Return, per arm, the two-sided joint p of the hypothesis that its difference equals its entry in `values`."""
        import numpy as np

        distance = self.means - np.asarray(values, dtype=float)
        squares = self._squares + self.pairs * distance**2
        own = scores(self._centred + self._counts * distance, squares, self.pairs)
        observed = scores(self.pairs * distance, squares, self.pairs)
        return (np.maximum(own, self._others) >= observed * (1 - ROUNDING)).mean(axis=0)

    def p_zero(self) -> list[float]:
        """Return the joint p of a zero difference per arm; it is below alpha if the 1 − alpha interval excludes 0."""
        return [float(one) for one in self.p(0 * self.means)]

    def bounds(self, alpha: float) -> list[Bounds]:
        """Return the ends of every arm's interval of joint confidence 1 − `alpha`.

        Student's t with Bonferroni's correction is used where the pairs are too few for the flips to exclude a value.
        """
        low, high = self._end(alpha, -1.0), self._end(alpha, 1.0)
        return [self._bounds(at, float(low[at]), float(high[at]), alpha) for at in range(len(self.means))]

    def _bounds(self, at: int, low: float, high: float, alpha: float) -> Bounds:
        from scipy import stats

        pairs, mean = int(self.pairs[at]), float(self.means[at])
        if pairs < 2:
            return Bounds(None, None, "")
        if self._squares[at] <= 1e-24 * max(1.0, mean**2):
            return Bounds(mean, mean, "all differences are equal")
        if smallest_p(pairs) < alpha:
            if not low > float("-inf") or not high < float("inf"):
                return Bounds(None, None, "the flips exclude no value")
            return Bounds(low, high, "joint sign flips")
        half = float(stats.t.ppf(1 - alpha / 2 / len(self.means), pairs - 1) * self.errors()[at])
        return Bounds(mean - half, mean + half, "Student's t, Bonferroni")

    def _end(self, alpha: float, sign: float) -> Table:
        """Return one end of every interval, by bisection between the mean and a value far enough to be excluded."""
        import numpy as np

        farthest = 2 * t_of(self._others.max(axis=0, initial=0.0), self.pairs) + 2 * self.pairs + 10
        inside = np.zeros(len(self.means))
        outside = farthest * self.errors()
        # with few seeds, the flips of one arm can be so extreme that no value of another is excluded
        endless = self.p(self.means + sign * outside) >= alpha
        for _ in range(ROUNDS):
            middle = (inside + outside) / 2
            included = self.p(self.means + sign * middle) >= alpha
            inside, outside = np.where(included, middle, inside), np.where(included, outside, middle)
        return np.where(endless, sign * np.inf, self.means + sign * outside)


def _largest_of_the_others(arm_scores: Table) -> Table:
    """Return, for every flip and arm, the largest score among the other arms; 0 where there is none."""
    import numpy as np

    if arm_scores.shape[1] < 2:
        return np.zeros_like(arm_scores)
    rows, largest_at = np.arange(len(arm_scores)), arm_scores.argmax(axis=1)
    others = arm_scores.copy()
    others[rows, largest_at] = -1.0
    largest = np.repeat(arm_scores[rows, largest_at][:, None], arm_scores.shape[1], axis=1)
    largest[rows, largest_at] = others.max(axis=1)
    return largest


class Equivalence(NamedTuple):
    """The smallest margin within which an arm is shown to lie, and the p and result for a declared margin."""

    within: float | None
    p: float | None
    equivalent: bool


def equivalence(intervals: JointIntervals, margin: float | None, alpha: float = ALPHA) -> list[Equivalence]:
    """Return the result of two one-sided tests at `alpha` for every arm.

    `margin` is in the differences' unit, None when none is declared. Both tests are the joint sign-flip test of the
    value at the margin, so that with 95 % confidence every arm declared equivalent is so. Schuirmann 1987, doi
    10.1007/BF01068419.
    """
    import numpy as np

    bounds = intervals.bounds(2 * alpha)
    within = [None if one.low is None or one.high is None else max(abs(one.low), abs(one.high)) for one in bounds]
    if margin is None:
        return [Equivalence(one, None, False) for one in within]
    ends = np.full(len(bounds), margin)
    p = np.maximum(intervals.p(-ends), intervals.p(ends)) / 2
    # a mean outside the margin lies on the other side of its nearer end
    p = np.where(abs(intervals.means) < margin, p, 1 - p)
    return [
        Equivalence(one, None if one is None else float(at), one is not None and one < margin)
        for one, at in zip(within, p)
    ]
