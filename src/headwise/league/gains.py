"""What entries gain over worlds: figures over all runs with intervals, by resampling seeds within worlds.

A gain is the paired difference to the plain model in the outcome that decides, turned so that more is better, in units
of the plain model's spread between its seeds in that world. Aggregates as in Agarwal et al. 2021 (arXiv 2108.13264).
The worlds are the ones that were chosen: no interval here says anything of others; leaving a world out does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Indices = NDArray[np.int64]

RESAMPLES = 1000
CONFIDENCE = 0.95
# gains at which a profile is read, in spreads of the plain model
LEVELS = tuple(-3 + 0.5 * at for at in range(13))


@dataclass(frozen=True)
class Figures:
    """Hold one world's runs: by entry the figures of its seeds (NaN where missing), more is better, and those of the
    plain model."""

    name: str
    plain: Array
    entries: dict[str, Array]
    # of gains, where it is not the plain model's own spread here
    unit: float | None = None

    @property
    def spread(self) -> float:
        """Return the standard deviation of the plain model between seeds, the unit of gains; 0 or NaN sets no unit."""
        import numpy as np

        if self.unit is not None:
            return self.unit
        found = self.plain[np.isfinite(self.plain)]
        return float(found.std(ddof=1)) if len(found) > 1 else float("nan")

    @property
    def has_unit(self) -> bool:
        """Return whether gains of this world can be put beside those of others."""
        import numpy as np

        return bool(self.spread > 1e-12 * max(1.0, float(np.nanmax(np.abs(self.plain)))))


@dataclass(frozen=True)
class Estimate:
    """Hold a figure and its interval; None where no world gives it."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Aggregate:
    """Hold what an entry does over all worlds in which it was run."""

    worlds: int
    gain: Estimate
    improvement: Estimate
    rank: Estimate
    # share of runs whose gain exceeds each of LEVELS
    profile: tuple[Estimate, ...]


def interquartile_mean(values: Array) -> Array:
    """Return the mean along the last axis without the lowest and highest quarter (rounded down); NaN is no value."""
    import numpy as np

    rows = np.atleast_2d(np.asarray(values, dtype=float))
    counts = np.isfinite(rows).sum(-1)
    ordered, found = np.sort(rows, axis=-1), np.full(len(rows), np.nan)
    for count in np.unique(counts[counts > 0]):
        at, cut = counts == count, count // 4
        found[at] = ordered[at, cut : count - cut].mean(-1)
    return found if np.ndim(values) > 1 else found[0]


def probability_of_improvement(ours: Array, others: Array) -> Array:
    """Return how often a run of ours (…, n) is better than one of the others (m), over all pairs; equal ones count
    half."""
    import numpy as np

    one, other = ours[..., :, None], others[None, :]
    won = np.where(one > other, 1.0, np.where(one == other, 0.5, 0.0))
    return _mean(np.where(np.isfinite(one) & np.isfinite(other), won, np.nan), (-2, -1))


def ranks_of(means: Array) -> Array:
    """Return the rank of each mean among those that are there, 1 for the highest, equal ones sharing theirs."""
    import numpy as np
    from scipy import stats

    found = np.full(len(means), np.nan)
    there = np.isfinite(means)
    if there.any():
        found[there] = stats.rankdata(-means[there])
    return found


def rank_correlation(one: Array, other: Array) -> float:
    """Return Spearman's correlation over the entries that have both figures; NaN below three, or where one does not
    vary."""
    import numpy as np

    there = np.isfinite(one) & np.isfinite(other)
    if there.sum() < 3:
        return float("nan")
    first, second = ranks_of(one[there]), ranks_of(other[there])
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return float("nan")
    return float(np.corrcoef(first, second)[0, 1])


class Worlds:
    """Hold all worlds that set a unit, with one row an entry, and what is computed of a resample of their seeds."""

    def __init__(self, worlds: Sequence[Figures]) -> None:
        import numpy as np

        self.worlds = [world for world in worlds if world.has_unit]
        self.left_out = [world.name for world in worlds if not world.has_unit]
        self.names = list(dict.fromkeys(name for world in self.worlds for name in world.entries))
        self._tables = [self._table(world) for world in self.worlds]
        self._there = np.array([[np.isfinite(row).any() for row in table] for table in self._tables], dtype=bool)
        self._drawn = self._draw()

    def aggregates(self) -> dict[str, Aggregate]:
        """Return the aggregate of every entry, the plain model not among them."""
        import numpy as np

        if not self.worlds:
            return {}
        gain, improvement = self._estimates(self._gain), self._estimates(self._improvement)
        rank, profile = self._estimates(self._rank), self._estimates(self._profile)
        counted = self._there.sum(0)
        width = len(LEVELS)
        return {
            name: Aggregate(
                int(counted[at]), gain[at], improvement[at], rank[at], tuple(profile[at * width : (at + 1) * width])
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

    def differences(self, pairs: Sequence[tuple[str, str]]) -> list[Estimate]:
        """Return the interquartile mean of the paired differences of two entries' gains, for each pair of names, over
        the worlds in which both ran."""
        ones, others = ([self.names.index(names[at]) for names in pairs] for at in (0, 1))

        def figure(parts: list[tuple[Figures, Array, Array]]) -> Array:
            import numpy as np

            gains = np.concatenate([_gains(world, table, plain) for world, table, plain in parts], axis=1)
            return interquartile_mean(gains[ones] - gains[others])

        return self._estimates(figure)

    def left_out_each(self) -> dict[str, Estimate]:
        """Return, for each world, how well the order of entries in the others foretells its own; and "mean" over
        worlds.

        It is Spearman's correlation of the interquartile mean of gains elsewhere with the mean gain here. Resampled
        seeds add noise, which lowers it: the interval lies rather too low.
        """
        if len(self.worlds) < 2:
            return {}
        found = self._estimates(self._foretold)
        return dict(zip([*(world.name for world in self.worlds), "mean"], found))

    def _table(self, world: Figures) -> Array:
        import numpy as np

        missing = np.full(len(world.plain), np.nan)
        return np.array([world.entries.get(name, missing) for name in self.names], dtype=float).reshape(
            len(self.names), -1
        )

    def _draw(self) -> list[list[Indices]]:
        """Return the seeds of every resample, by world: all entries of a world share them, so that pairs stay pairs."""
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

        whole = of([np.arange(len(world.plain)) for world in self.worlds])
        drawn = np.array([of(seeds) for seeds in self._drawn])
        tail = 100 * (1 - CONFIDENCE) / 2
        found = []
        for at, value in enumerate(whole):
            column = drawn[:, at][np.isfinite(drawn[:, at])]
            ends = np.percentile(column, [tail, 100 - tail]) if len(column) else (np.nan, np.nan)
            found.append(Estimate(_known(value), _known(ends[0]), _known(ends[1])))
        return found

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

    def _foretold(self, parts: list[tuple[Figures, Array, Array]]) -> Array:
        import numpy as np

        gains = [_gains(world, table, plain) for world, table, plain in parts]
        found = []
        for at, here in enumerate(gains):
            others = interquartile_mean(np.concatenate(gains[:at] + gains[at + 1 :], axis=1))
            found.append(rank_correlation(others, _mean(here, -1)))
        return np.array([*found, _mean(np.array(found), 0)])


def _gains(world: Figures, table: Array, plain: Array | None = None) -> Array:
    return (table - (world.plain if plain is None else plain)) / world.spread


def _mean(values: Array, axis: int | tuple[int, ...]) -> Any:
    """Return the mean of what is there; NaN, without a warning, where nothing is."""
    import numpy as np

    there = np.isfinite(values)
    count = there.sum(axis)
    return np.where(count > 0, np.where(there, values, 0.0).sum(axis) / np.maximum(count, 1), np.nan)


def _known(value: float) -> float | None:
    return float(value) if value == value else None
