"""The gains of entries over worlds, with intervals from resampling seeds within worlds.

A gain is the paired difference from the plain model in the primary outcome, with the sign that makes more better, in
units of the plain model's standard deviation between seeds in that world, fresh seeds included. The aggregates are
those of Agarwal et al. 2021 (arXiv 2108.13264). The intervals hold for these worlds only; leaving out one world at a
time shows how far the order of entries carries over to others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise_verdict.results.joint_flips import seeds_for_a_verdict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Indices = NDArray[np.int64]

RESAMPLES = 1000
CONFIDENCE = 0.95
# gains at which a profile is evaluated, in spreads of the plain model
LEVELS = tuple(-3 + 0.5 * at for at in range(13))


@dataclass(frozen=True)
class Figures:
    """The figures of one world by seed, for the plain model and every entry: more is better, NaN where missing."""

    name: str
    plain: Array
    entries: dict[str, Array]
    # the unit of gains, if it is not the spread of `plain`: that over fresh seeds too, or the league's own
    unit: float | None = None

    @property
    def spread(self) -> float:
        """Return the unit of gains: the plain model's standard deviation between seeds; 0 or NaN if there is none."""
        import numpy as np

        if self.unit is not None:
            return self.unit
        values = self.plain[np.isfinite(self.plain)]
        return float(values.std(ddof=1)) if len(values) > 1 else float("nan")

    @property
    def has_unit(self) -> bool:
        """Return whether the world has a unit, so that its gains can be compared with those of others."""
        import numpy as np

        return bool(self.spread > 1e-12 * max(1.0, float(np.nanmax(np.abs(self.plain)))))


@dataclass(frozen=True)
class Estimate:
    """A figure and its interval; None if no world has data for it."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Aggregate:
    """The aggregate of an entry over all worlds in which it was run."""

    worlds: int
    gain: Estimate
    improvement: Estimate
    rank: Estimate
    # share of runs whose gain exceeds each of LEVELS
    profile: tuple[Estimate, ...]


def interquartile_mean(values: Array) -> Array:
    """Return the mean along the last axis without the lowest and highest quarter (rounded down); NaN is ignored."""
    import numpy as np

    rows = np.atleast_2d(np.asarray(values, dtype=float))
    counts = np.isfinite(rows).sum(-1)
    ordered, means = np.sort(rows, axis=-1), np.full(len(rows), np.nan)
    for count in np.unique(counts[counts > 0]):
        at, cut = counts == count, count // 4
        means[at] = ordered[at, cut : count - cut].mean(-1)
    return means if np.ndim(values) > 1 else means[0]


def probability_of_improvement(ours: Array, others: Array) -> Array:
    """Return the share of pairs in which a run of `ours` (…, n) is better than one of `others` (m); ties count half."""
    import numpy as np

    one, other = ours[..., :, None], others[None, :]
    won = np.where(one > other, 1.0, np.where(one == other, 0.5, 0.0))
    return _mean(np.where(np.isfinite(one) & np.isfinite(other), won, np.nan), (-2, -1))


def ranks_of(means: Array) -> Array:
    """Return the rank of each mean that is not NaN, 1 for the highest; ties share their mean rank."""
    import numpy as np
    from scipy import stats

    ranks = np.full(len(means), np.nan)
    known = np.isfinite(means)
    if known.any():
        ranks[known] = stats.rankdata(-means[known])
    return ranks


def rank_correlation(one: Array, other: Array) -> float:
    """Return Spearman's correlation over entries with both figures; NaN for fewer than three or constant figures."""
    import numpy as np

    known = np.isfinite(one) & np.isfinite(other)
    if known.sum() < 3:
        return float("nan")
    first, second = ranks_of(one[known]), ranks_of(other[known])
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return float("nan")
    return float(np.corrcoef(first, second)[0, 1])


class Worlds:
    """All worlds that have a unit, and the aggregates over them, with intervals from resamples of their seeds."""

    def __init__(self, worlds: Sequence[Figures]) -> None:
        import numpy as np

        self.worlds = [world for world in worlds if world.has_unit]
        self.left_out = [world.name for world in worlds if not world.has_unit]
        self.names = list(dict.fromkeys(name for world in self.worlds for name in world.entries))
        self._tables = [self._table(world) for world in self.worlds]
        self._has_runs = np.array([[np.isfinite(row).any() for row in table] for table in self._tables], dtype=bool)
        # an interval from fewer seeds than any verdict needs would say more than they can
        runs = np.array([[np.isfinite(row).sum() for row in table] for table in self._tables], dtype=int)
        self._enough = (
            np.where(runs > 0, runs, seeds_for_a_verdict()).min(0) >= seeds_for_a_verdict() if len(runs) else []
        )
        self._drawn = self._draw()

    def aggregates(self) -> dict[str, Aggregate]:
        """Return the aggregate of every entry except the plain model."""
        import numpy as np

        if not self.worlds:
            return {}
        gain, improvement = self._estimates(self._gain), self._estimates(self._improvement)
        rank, profile = self._estimates(self._rank), self._estimates(self._profile)
        counted, enough = self._has_runs.sum(0), self._enough
        width = len(LEVELS)
        return {
            name: Aggregate(
                int(counted[at]),
                _if(enough[at], gain[at]),
                _if(enough[at], improvement[at]),
                _if(enough[at], rank[at]),
                tuple(profile[at * width : (at + 1) * width]),
            )
            for at, name in enumerate(self.names)
            if counted[at] or not np.isnan(gain[at].value or 0.0)
        }

    def mean_gains(self) -> dict[str, dict[str, float | None]]:
        """Return the mean gain of every entry in every world."""
        return {
            world.name: {name: _known(value) for name, value in zip(self.names, _mean(_gains(world, table), -1))}
            for world, table in zip(self.worlds, self._tables)
        }

    def gains_without_each(self) -> dict[str, dict[str, float | None]]:
        """Return the gain of every entry over all worlds but one, for each world left out."""
        return {
            left_out.name: {
                name: _known(value)
                for name, value in zip(
                    self.names,
                    self._gain(
                        [
                            (world, table, world.plain)
                            for world, table in zip(self.worlds, self._tables)
                            if world is not left_out
                        ]
                    ),
                )
            }
            for left_out in (self.worlds if len(self.worlds) > 1 else [])
        }

    def differences(self, pairs: Sequence[tuple[str, Sequence[str]]]) -> list[Estimate]:
        """Return, for a name and others, the interquartile mean of its gain minus the sum of theirs, seed by seed.

        The mean is over the worlds in which all of them ran.
        """
        ones = [self.names.index(name) for name, _ in pairs]

        def figure(parts: list[tuple[Figures, Array, Array]]) -> Array:
            import numpy as np

            gains = np.concatenate([_gains(world, table, plain) for world, table, plain in parts], axis=1)
            sums = [sum(gains[self.names.index(name)] for name in others) for _, others in pairs]
            return interquartile_mean(gains[ones] - np.array(sums))

        return self._estimates(figure)

    def left_out_each(self) -> dict[str, Estimate]:
        """Return, for each world, how well the order of entries in the others predicts its own; and "mean" over worlds.

        It is Spearman's correlation of the interquartile mean of gains in the other worlds with the mean gain in this
        one. Resampled seeds add noise, which lowers the correlation, so the interval tends to be too low.
        """
        if len(self.worlds) < 2:
            return {}
        estimates = self._estimates(self._rank_correlations)
        return dict(zip([*(world.name for world in self.worlds), "mean"], estimates))

    def _table(self, world: Figures) -> Array:
        import numpy as np

        missing = np.full(len(world.plain), np.nan)
        return np.array([world.entries.get(name, missing) for name in self.names], dtype=float).reshape(
            len(self.names), -1
        )

    def _draw(self) -> list[list[Indices]]:
        """Return the seeds of every resample by world; all entries of a world share them, which keeps the pairing."""
        import numpy as np

        generator = np.random.default_rng(0)
        sizes = [len(world.plain) for world in self.worlds]
        return [[generator.integers(size, size=size) for size in sizes] for _ in range(RESAMPLES)]

    def _estimates(self, figure: Callable[[list[tuple[Figures, Array, Array]]], Array]) -> list[Estimate]:
        import numpy as np

        def of(seeds: Sequence[Indices]) -> Array:
            parts = [
                (world, table[:, at], world.plain[at]) for world, table, at in zip(self.worlds, self._tables, seeds)
            ]
            return figure(parts)

        observed = of([np.arange(len(world.plain)) for world in self.worlds])
        resampled = np.array([of(seeds) for seeds in self._drawn])
        tail = 100 * (1 - CONFIDENCE) / 2
        estimates = []
        for at, value in enumerate(observed):
            column = resampled[:, at][np.isfinite(resampled[:, at])]
            ends = np.percentile(column, [tail, 100 - tail]) if len(column) else (np.nan, np.nan)
            estimates.append(Estimate(_known(value), _known(ends[0]), _known(ends[1])))
        return estimates

    def _gain(self, parts: list[tuple[Figures, Array, Array]]) -> Array:
        import numpy as np

        return interquartile_mean(
            np.concatenate([_gains(world, table, plain) for world, table, plain in parts], axis=1)
        )

    def _improvement(self, parts: list[tuple[Figures, Array, Array]]) -> Array:
        import numpy as np

        return _mean(np.array([probability_of_improvement(table, plain) for _, table, plain in parts]), 0)

    def _rank(self, parts: list[tuple[Figures, Array, Array]]) -> Array:
        import numpy as np

        return _mean(np.array([ranks_of(_mean(table, -1)) for _, table, _ in parts]), 0)

    def _profile(self, parts: list[tuple[Figures, Array, Array]]) -> Array:
        import numpy as np

        shares = []
        for world, table, plain in parts:
            gains = _gains(world, table, plain)[:, :, None]
            shares.append(_mean(np.where(np.isfinite(gains), gains > np.array(LEVELS), np.nan), 1))
        return _mean(np.array(shares), 0).ravel()

    def _rank_correlations(self, parts: list[tuple[Figures, Array, Array]]) -> Array:
        import numpy as np

        gains = [_gains(world, table, plain) for world, table, plain in parts]
        correlations = []
        for at, world_gains in enumerate(gains):
            others = interquartile_mean(np.concatenate(gains[:at] + gains[at + 1 :], axis=1))
            correlations.append(rank_correlation(others, _mean(world_gains, -1)))
        return np.array([*correlations, _mean(np.array(correlations), 0)])


def _gains(world: Figures, table: Array, plain: Array | None = None) -> Array:
    return (table - (world.plain if plain is None else plain)) / world.spread


def _mean(values: Array, axis: int | tuple[int, ...]) -> Any:
    """Return the mean of the finite values; NaN, without a warning, if there are none."""
    import numpy as np

    finite = np.isfinite(values)
    count = finite.sum(axis)
    return np.where(count > 0, np.where(finite, values, 0.0).sum(axis) / np.maximum(count, 1), np.nan)


def _if(enough: bool, estimate: Estimate) -> Estimate:
    return estimate if enough else Estimate(estimate.value)


def _known(value: float) -> float | None:
    return float(value) if value == value else None
