"""The search of one contestant in one world, as a function of the runs so far: what is missing, or what was chosen.

Every contestant gets the same: its first arm at every rate of the world's grid, on two tuning seeds; if the best rate
is at an end of the grid, the next rates beyond it; its other arms at the best rate; and, if another arm is better, the
two rates next to the best. A choice is the lowest mean validation error. Final seeds are other seeds, and they alone
read the test split.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headwise_papers.league.brief_run import Figures
from headwise_papers.league.contest_files import HIGHEST, LOWEST, STEPS_A_DECADE, Contestant, SmallWorld, rate_at, rates
from headwise_papers.league.run_ledger import Run

TUNING, FINAL = (1000, 1001), tuple(range(8))
# tuning seeds of each repetition of the plain model's search; the next is made only if the one before moved it
AGAIN = ((2000, 2001), (4000, 4001), (5000, 5001))
# rates beyond an end of the grid that are tried before the end itself is taken
BEYOND = 3


@dataclass(frozen=True)
class Chosen:
    """What a search chose: an arm, its rate, the mean validation error, and whether the rate is inside its grid."""

    arm: str
    rate: float
    error: float
    is_inside: bool


class Errors:
    """Errors of runs: 1 − metric if higher is better, else the metric; a run that diverged has that of failure."""

    def __init__(self, runs: Mapping[Run, Figures], failure: float, *, higher: bool = True) -> None:
        self.runs, self.failure, self.higher = runs, failure, higher

    def of(self, run: Run, split: str = "validation") -> float | None:
        """Return the error of a run; None if it was not made."""
        figures = self.runs.get(run)
        if figures is None:
            return None
        value = getattr(figures, split)
        value = self.failure if value is None else value
        return 1 - value if self.higher else value

    def mean(self, runs: Iterable[Run], split: str = "validation") -> float | None:
        """Return the mean error of runs; None unless all were made."""
        values = [self.of(run, split) for run in runs]
        return None if None in values or not values else statistics.fmean(one for one in values if one is not None)


def search(world: SmallWorld, contestant: Contestant, errors: Errors) -> list[Run] | Chosen:
    """Return the runs that a contestant's search lacks next, or its choice."""
    found = _best_rate(world, contestant.arms[0], contestant.reparametrizes, errors, TUNING)
    if isinstance(found, list):
        return found
    arms = {arm: [Run(arm, found.rate, seed) for seed in TUNING] for arm in contestant.arms}
    if missing := _missing([run for some in arms.values() for run in some], errors):
        return missing
    arm = min(arms, key=lambda one: errors.mean(arms[one]) or 0.0)
    if arm == contestant.arms[0]:
        return found
    beside = {rate: [Run(arm, rate, seed) for seed in TUNING] for rate in _beside(world, found.rate)}
    if missing := _missing([run for some in beside.values() for run in some], errors):
        return missing
    rate = min(beside, key=lambda one: errors.mean(beside[one]) or 0.0)
    return Chosen(arm, rate, errors.mean(beside[rate]) or 0.0, found.is_inside)


def search_again(world: SmallWorld, errors: Errors, repetition: int = 0) -> list[Run] | Chosen:
    """Return the same for the plain model with twice the rates, on the tuning seeds of a repetition."""
    return _best_rate(world, "baseline", False, errors, AGAIN[repetition], halved=True)


def search_eased(world: SmallWorld, errors: Errors) -> list[Run] | Chosen:
    """Return the same for the plain model of the eased world, which at another depth has another best rate."""
    return _best_rate(world, "baseline", False, errors, TUNING, eased=True)


def finals(chosen: Chosen) -> list[Run]:
    """Return the final runs of a choice."""
    return [Run(chosen.arm, chosen.rate, seed) for seed in FINAL]


def _best_rate(
    world: SmallWorld,
    arm: str,
    wide: bool,
    errors: Errors,
    seeds: tuple[int, ...],
    *,
    halved: bool = False,
    eased: bool = False,
) -> list[Run] | Chosen:
    grid = rates(world, wide=wide, halved=halved)

    def runs(rate: float) -> list[Run]:
        return [Run(arm, rate, seed, eased) for seed in seeds]

    def missing(some: Iterable[float]) -> list[Run]:
        return _missing([run for rate in some for run in runs(rate)], errors)

    if lacking := missing(grid):
        return lacking

    def best() -> float:
        return min(grid, key=lambda rate: errors.mean(runs(rate)) or 0.0)

    for at in range(1, BEYOND + 1):
        if best() not in (grid[0], grid[-1]):
            break
        is_low = best() == grid[0]
        last = HIGHEST + (STEPS_A_DECADE if wide else 0)
        further = rate_at(world, (LOWEST - at if is_low else last + at) / STEPS_A_DECADE)
        if lacking := missing([further]):
            return lacking
        grid = sorted({*grid, further})
    rate = best()
    return Chosen(arm, rate, errors.mean(runs(rate)) or 0.0, rate not in (grid[0], grid[-1]))


def _beside(world: SmallWorld, rate: float) -> list[float]:
    """Return a rate of the grid and its two neighbours, which may be beyond its ends."""
    known = [rate_at(world, at / STEPS_A_DECADE) for at in range(LOWEST - BEYOND - 1, HIGHEST + STEPS_A_DECADE + 5)]
    at = known.index(rate)
    return known[at - 1 : at + 2]


def _missing(runs: Iterable[Run], errors: Errors) -> list[Run]:
    return [run for run in dict.fromkeys(runs) if run not in errors.runs]
