"""The max-T permutation test of all arms against the baseline at once, by sign flips of whole seeds.

Its statistic is the largest studentised mean over the arms; stepping down gives a corrected p for each arm. Reports
print `JointIntervals.p_zero` of intervals.py, which agrees with their intervals; runs that diverged are judged here.

Within a seed all arms share their baseline run, so their differences depend on one another. Flipping the sign of all
differences of a seed together keeps that dependence, and one reference distribution (the largest |t| over arms) then
serves every arm. Westfall and Young 1993, "Resampling-based multiple testing", algorithm 4.1; Romano and Wolf 2005, doi
10.1198/016214504000000539.

A table of differences is seeds × arms, NaN where a pair is missing. Arms with different numbers of pairs are compared
as normal deviates, because a t of few pairs is large by chance; an arm that has lost so many pairs that nothing can be
shown of it does not weaken the correction of the others (Tarone 1990, doi 10.2307/2531456).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Table = NDArray[np.float64]

EXACT_UP_TO = 16  # pairs; all their 2ⁿ sign flips are counted
RESAMPLES = 19_999  # random flips of more pairs
# cap on t² / (n − 1): beyond it only rounding would order two figures
FARTHEST = 1e6
# relative difference that rounding can cause between equal scores
ROUNDING = 1e-7
# squared sums below this share of the largest possible one are 0 except for rounding
NOTHING = 1e-20


class Flips(NamedTuple):
    """Sign flips (flips × seeds), the first of them the observed one; `exact` if they are all possible flips."""

    signs: Table
    exact: bool


class JointTest(NamedTuple):
    """Two-sided p-values per arm: of the arm alone, and corrected for all arms."""

    alone: list[float]
    corrected: list[float]


def flips(seeds: int, *, exact_up_to: int = EXACT_UP_TO, resamples: int = RESAMPLES) -> Flips:
    """Return all sign flips up to a global sign, which changes no two-sided figure, or a reproducible random sample."""
    import numpy as np

    if seeds <= exact_up_to:
        bits = np.arange(2 ** max(seeds - 1, 0))[:, None] >> np.arange(seeds) & 1
        return Flips((1.0 - 2.0 * bits).astype(np.float64), True)
    bits_drawn = np.random.default_rng(0).integers(0, 2, (resamples + 1, seeds))
    bits_drawn[0] = 0
    return Flips((1.0 - 2.0 * bits_drawn).astype(np.float64), False)


def smallest_p(pairs: int) -> float:
    """Return the smallest two-sided p that this number of pairs can give, whatever the number of arms.

    It is 2/2ⁿ while all flips are counted.
    """
    return max(2.0 ** (1 - pairs), 0.0 if pairs <= EXACT_UP_TO else 1 / (RESAMPLES + 1)) if pairs else 1.0


def seeds_for_a_verdict(alpha: float = 0.05) -> int:
    """Return the smallest number of seeds that can decide a difference, whatever the number of arms."""
    pairs = 1
    while smallest_p(pairs) >= alpha:
        pairs += 1
    return pairs


def competing(pairs: NDArray[np.int64], least: int) -> NDArray[np.bool_]:
    """Return, per arm, whether the others are corrected for it: not one left with fewer pairs than `least`.

    `least` is the smallest number of pairs that a verdict takes. Where no arm has as many, all that have the most
    compete.
    """
    return pairs >= min(least, int(pairs.max(initial=0)))


def joint_test(differences: Table) -> JointTest:
    """Return the p of every arm, alone and corrected for all arms by the step-down max-T procedure.

    It controls the family-wise error if, under the null hypothesis, the differences of a seed are as likely as their
    mirror image. An arm without a pair has p = 1.
    """
    import numpy as np

    table = np.asarray(differences, dtype=float)
    table = table[np.isfinite(table).any(axis=1)] if table.size else table
    values, pairs = np.nan_to_num(table), np.isfinite(table).sum(axis=0)
    squares = (values**2).sum(axis=0)
    observed = scores(values.sum(axis=0), squares, pairs)
    order = np.argsort(-observed, kind="stable")
    rivals = competing(pairs, seeds_for_a_verdict())
    alone, joint = np.zeros(len(observed)), np.zeros(len(observed))
    signs = flips(len(values)).signs
    for part in np.array_split(signs, max(1, len(signs) // 16_384)):
        flipped = scores(part @ values, squares, pairs)
        threshold = observed * (1 - ROUNDING)
        alone += (flipped >= threshold).sum(axis=0)
        # at each step, the arm's own score or the largest of the remaining arms
        largest = np.maximum.accumulate((flipped * rivals)[:, order[::-1]], axis=1)[:, ::-1]
        joint += (np.maximum(largest, flipped[:, order]) >= threshold[order]).sum(axis=0)
    corrected = np.ones(len(observed))
    corrected[order] = np.maximum.accumulate(joint / len(signs))
    return JointTest((alone / len(signs)).tolist(), corrected.tolist())


def joint_pairs_test(differences: Table) -> JointTest:
    """Return the p of every arm whose differences are −1, 0 or 1: McNemar's exact test, corrected by joint flips.

    In each flip the smallest p over the arms is the reference, stepping down (Westfall and Young 1993, algorithm 2.8).
    An arm with too few pairs that differ has no small p in any flip, and does not weaken the correction of the others
    (Tarone 1990, doi 10.2307/2531456).
    """
    import numpy as np
    from scipy import stats

    table = np.nan_to_num(np.asarray(differences, dtype=float))
    signs = flips(len(table)).signs
    p_values = np.ones((len(signs), table.shape[1]))
    for at in range(table.shape[1]):
        unlike = int(abs(table[:, at]).sum())
        sums = np.arange(unlike + 1)
        by_sum = np.minimum(2 * stats.binom.sf((unlike + sums) // 2 - 1, unlike, 0.5), 1.0)
        # sums have the parity of the number of pairs that differ; other sums do not occur
        p_values[:, at] = np.where(sums[0] == unlike, 1.0, by_sum[abs(signs @ table[:, at]).round().astype(int)])
    observed, least = p_values[0], p_values.copy()
    order = np.argsort(observed, kind="stable")
    least[:, order] = np.minimum.accumulate(p_values[:, order[::-1]], axis=1)[:, ::-1]
    shares = (least <= observed * (1 + ROUNDING)).mean(axis=0)
    corrected = np.ones(len(observed))
    corrected[order] = np.maximum.accumulate(shares[order])
    return JointTest(observed.tolist(), corrected.tolist())


def sign_flip(differences: list[float]) -> float:
    """Return the two-sided p that the mean of paired differences is 0, of one arm alone."""
    import numpy as np

    return joint_test(np.asarray(differences, dtype=float)[:, None]).alone[0] if len(differences) else 1.0


def scores(sums: Table, squares: Table, pairs: NDArray[np.int64]) -> Table:
    """Return the square of the normal deviate of the mean's t, 0 where every difference is 0.

    Deviates of different numbers of pairs can be compared (Wallace 1959, doi 10.1214/aoms/1177706093); among equal
    numbers they are ordered as t² is. A flip changes the sum but not the sum of squares.
    """
    import numpy as np

    largest = pairs * squares
    share = np.divide(sums**2, largest, out=np.zeros(np.broadcast(sums, largest).shape), where=largest > 0)
    share = np.where(share > NOTHING, share, 0.0)
    return -_stretch(pairs) * np.log1p(-np.minimum(share, 1 - 1 / FARTHEST))


def t_of(score: Table, pairs: NDArray[np.int64]) -> Table:
    """Return |t| of a score."""
    import numpy as np

    degrees = (pairs - 1).clip(0)
    ratio = np.divide(score, _stretch(pairs), out=np.zeros_like(score), where=degrees > 0)
    return np.sqrt(degrees * np.expm1(ratio.clip(max=np.log(FARTHEST))))


def _stretch(pairs: NDArray[np.int64]) -> Table:
    degrees = (pairs - 1).clip(0).astype(float)
    stretched: Table = degrees * ((8 * degrees + 1) / (8 * degrees + 3)) ** 2
    return stretched
