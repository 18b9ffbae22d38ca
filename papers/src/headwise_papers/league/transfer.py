"""Whether a gain carries over: the mean over worlds with an interval for a new one, and each world left out in turn.

A gain is the share of the plain model's errors that a contestant avoids, on final seeds, paired by seed. Worlds of a
symptom are drawn from all that have it, so each counts once: the mean over them, its Student's t interval over worlds,
and the prediction interval for a new world (random effects with equal weights, as Shuster 2010, doi 10.1002/sim.3607).
Weights by precision would let one world that is known exactly (a tuned rate that is the usual one gains 0 ± 0) stand
for all. The variance over worlds is taken as no smaller than the mean variance within them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
# worlds of a symptom below which nothing is advised on it
FEWEST = 3


@dataclass(frozen=True)
class Gain:
    """A gain in one world with its 95 % interval and squared standard error."""

    mean: float
    low: float
    high: float
    variance: float


@dataclass(frozen=True)
class Pooled:
    """A mean over worlds with its 95 % interval, the prediction interval for a new world, and the variance between."""

    worlds: int
    mean: float
    low: float
    high: float
    new_low: float
    new_high: float
    tau2: float


@dataclass(frozen=True)
class Standing:
    """The gains of all contestants of one world: against the best plain model, and against the best control."""

    world: str
    to_plain: Mapping[str, Gain]
    to_control: Mapping[str, Gain]
    control: str


@dataclass(frozen=True)
class Turn:
    """One world left out: what the others choose, its gains here, and whether both intervals are above 0.

    `to_control` is None if the choice is the best control itself.
    """

    left_out: str
    chosen: str
    to_plain: Gain
    to_control: Gain | None

    @property
    def carried(self) -> bool:
        """Return whether the choice gains here against the best plain model and the best control."""
        return self.to_plain.low > 0 and (self.to_control is None or self.to_control.low > 0)


def gain_of(errors: Sequence[float], against: Sequence[float]) -> Gain:
    """Return the gain of `errors` over `against`, paired by position, as a share of the mean of `against`.

    Raises:
        ValueError: for fewer than two pairs, unequal numbers, or a reference without errors.
    """
    if len(errors) != len(against) or len(errors) < 2:
        raise ValueError(f"a gain needs two pairs or more, got {len(errors)} and {len(against)} errors")
    from scipy import stats

    unit = statistics.fmean(against)
    if unit <= 0:
        raise ValueError("the reference makes no error, so no share of its errors can be avoided")
    differences = [other - one for one, other in zip(errors, against, strict=True)]
    mean = statistics.fmean(differences) / unit
    variance = statistics.variance(differences) / len(differences) / unit**2
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(differences) - 1)) * math.sqrt(variance)
    return Gain(mean, mean - half, mean + half, variance)


def pooled(gains: Sequence[Gain]) -> Pooled:
    """Return the mean of gains over several worlds, each counted once.

    Raises:
        ValueError: for fewer than two worlds.
    """
    if len(gains) < 2:
        raise ValueError("a mean over worlds needs two of them")
    from scipy import stats

    means, count = [one.mean for one in gains], len(gains)
    mean, within = statistics.fmean(means), statistics.fmean(one.variance for one in gains)
    between = statistics.variance(means)
    variance = max(between, within)
    quantile = float(stats.t.ppf(0.5 + CONFIDENCE / 2, count - 1))
    half, wide = quantile * math.sqrt(variance / count), quantile * math.sqrt(variance * (1 + 1 / count))
    return Pooled(count, mean, mean - half, mean + half, mean - wide, mean + wide, max(0.0, between - within))


def common(standings: Sequence[Standing]) -> list[str]:
    """Return the contestants that ran in all of these worlds."""
    return [name for name in standings[0].to_plain if all(name in one.to_plain for one in standings)]


def turns(standings: Sequence[Standing]) -> list[Turn]:
    """Return what each choice from all worlds but one gains in the one left out; empty below three worlds."""
    if len(standings) < FEWEST:
        return []
    found = []
    for left_out in standings:
        others = [one for one in standings if one is not left_out]
        means = {name: pooled([one.to_plain[name] for one in others]).mean for name in common(standings)}
        chosen = max(means, key=lambda name: means[name])
        against = None if chosen == left_out.control else left_out.to_control[chosen]
        found.append(Turn(left_out.world, chosen, left_out.to_plain[chosen], against))
    return found


def advice(standings: Sequence[Standing]) -> dict[str, str]:
    """Return the contestants that earn a word on a symptom: "try first" or "candidate".

    Try first: it is chosen whichever world is left out, and gains there each time. Candidate: the interval of its mean
    over all worlds is above 0. Nothing is said below three worlds.
    """
    if len(standings) < FEWEST:
        return {}
    told = turns(standings)
    words = {
        name: "candidate" for name in common(standings) if pooled([one.to_plain[name] for one in standings]).low > 0
    }
    if len({turn.chosen for turn in told}) == 1 and all(turn.carried for turn in told):
        words[told[0].chosen] = "try first"
    return words
