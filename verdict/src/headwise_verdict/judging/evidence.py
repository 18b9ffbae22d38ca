"""Evidence about a mean that may be looked at after every seed: an e-value and a confidence sequence.

The differences d of the pairs are normal with unknown mean μ and spread σ. With a normal prior N(0, c²) on the effect
size μ/σ and the scale-invariant prior 1/σ on the spread, the marginal likelihood of n differences, divided by that for
μ = m, is

    e_n(m) = (1 + n·c²)^(-1/2) · [(1 + t²/ν) / (1 + t²/(ν·(1 + n·c²)))]^((ν + 1)/2),  t = (mean - m)·√n / s, ν = n - 1

with the mean and the spread s of the differences. For any σ it is a test martingale under μ = m (Lai 1976, "On
confidence sequences"; Pérez-Ortiz, Lardy, de Heide and Grünwald 2022, arXiv 2208.07610; Wang and Ramdas 2023, arXiv
2310.03722). By Ville's inequality the probability that e_n(μ) ever reaches 1/α is at most α, whenever one stops. All m
with e_n(m) < 1/α are the confidence sequence, an interval in closed form.

Runs of a candidate may also be compared with a baseline that was measured before, in n₀ runs of the same spread: then n
is n₀·n₁/(n₀ + n₁), and ν is n₀ + n₁ - 2, with the pooled spread.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

# The spread c of the prior on the effect size, in spreads of a difference: changes worth a run are of this order.
EFFECT = 2.0
# further differences beyond which a forecast says only that it takes more
FORESEEN = 1000
# fewest differences whose order is tested
FEWEST_FOR_ORDER = 8


@dataclass(frozen=True)
class Sample:
    """What the evidence needs of differences: their mean, its standard error, and how well the spread is known.

    Attributes:
        mean: of the differences.
        spread: standard deviation of one difference.
        size: number of differences whose mean has the same error.
        freedom: degrees of freedom of the spread.
    """

    mean: float
    spread: float
    size: float
    freedom: float

    @property
    def error(self) -> float:
        """Return the standard error of the mean."""
        return self.spread / math.sqrt(self.size)


def paired(differences: Sequence[float]) -> Sample:
    """Return the sample of paired differences; raise ValueError for fewer than one."""
    n = len(differences)
    mean = math.fsum(differences) / n
    # squares of small differences would be 0, and of large ones infinite
    length = math.hypot(*(d - mean for d in differences))
    return Sample(mean, length / math.sqrt(n - 1) if n > 1 else math.nan, n, n - 1)


def against_floor(candidate: Sequence[float], mean: float, spread: float, runs: int) -> Sample:
    """Return the sample of a candidate's runs against a baseline of `runs` earlier runs with this mean and spread."""
    n = len(candidate)
    own = math.fsum(candidate) / n
    length = math.hypot(*(x - own for x in candidate), spread * math.sqrt(runs - 1))
    freedom = n + runs - 2
    return Sample(own - mean, length / math.sqrt(freedom), n * runs / (n + runs), freedom)


def e_value(sample: Sample, null: float = 0.0) -> float:
    """Return the evidence against a mean of `null`; 1 where the spread is not known yet.

    A spread of 0, as of few figures with few digits, is no proof: the evidence has a limit, which grows with the runs.
    """
    if sample.freedom < 1:
        return 1.0
    wide, nu = 1 + sample.size * EFFECT**2, sample.freedom
    if sample.spread == 0:
        return 1.0 if sample.mean == null else math.exp(min(nu / 2 * math.log(wide), 700.0))
    x = ((sample.mean - null) / sample.error) ** 2 / nu
    log = -0.5 * math.log(wide) + (nu + 1) / 2 * (math.log1p(x) - math.log1p(x / wide))
    return math.exp(min(log, 700.0))


def half_width(sample: Sample, alpha: float) -> float:
    """Return half the width of the confidence sequence at level 1 - alpha; infinite where it is not bounded yet."""
    if sample.freedom < 1:
        return math.inf
    wide, nu = 1 + sample.size * EFFECT**2, sample.freedom
    ratio = math.exp(2 / (nu + 1) * (0.5 * math.log(wide) - math.log(alpha)))
    if ratio >= wide:
        return math.inf
    return sample.error * math.sqrt(nu * (ratio - 1) / (1 - ratio / wide))


def further(sample: Sample, alpha: float, settles: Callable[[float, float], bool]) -> int | None:
    """Return the further differences after which the interval settles a question if mean and spread stay.

    None beyond what is foreseen. `settles` takes the ends of the interval.
    """
    for more in range(1, FORESEEN):
        then = replace(sample, size=sample.size + more, freedom=sample.freedom + more)
        half = half_width(then, alpha)
        if settles(sample.mean - half, sample.mean + half):
            return more
    return None


def autocorrelation(differences: Sequence[float]) -> float | None:
    """Return the lag-1 autocorrelation if it is significant (one-sided, 5 %; Anderson 1942); None for fewer than 8."""
    n = len(differences)
    mean = math.fsum(differences) / n if n else 0.0
    length = math.hypot(*(d - mean for d in differences))
    if n < FEWEST_FOR_ORDER or length == 0:
        return None
    scaled = [(d - mean) / length for d in differences]
    lagged = math.fsum(a * b for a, b in itertools.pairwise(scaled))
    return lagged if lagged > (-1 + 1.645 * math.sqrt(n - 2)) / (n - 1) else None


def interval(samples: Sequence[Sample], alpha: float) -> tuple[float, float]:
    """Return the confidence sequence after the last of the samples, one for each look.

    What one look has excluded stays excluded: all looks hold together. Where they exclude each other, which has
    probability alpha, the last one alone is returned.
    """
    ends = [(s.mean - half_width(s, alpha), s.mean + half_width(s, alpha)) for s in samples]
    low, high = max(low for low, _ in ends), min(high for _, high in ends)
    return (low, high) if low <= high else ends[-1]
