"""An assertion about a metric over seeds: the candidate is not worse than the baseline by more than a margin."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from headwise_verdict.judging.evidence import Sample, further, half_width, paired

# figures beyond this are those of runs that diverged, as in `headwise judge`
LARGEST = 1e100

Figures = Mapping[int, float] | Sequence[float]


def assert_not_worse(
    candidate: Figures, baseline: Figures, *, margin: float, better: str = "lower", alpha: float = 0.05
) -> None:
    """Pass if runs show that a candidate is not worse than a baseline by more than a margin.

    Too few runs to tell fail: an assertion that passes for lack of evidence holds nothing. The interval is that of
    `headwise judge`, so runs may be added until it passes.

    Args:
        candidate, baseline: the metric by seed, or in the same order of seeds.
        margin: the largest loss that you accept, above 0, in the unit of the metric.
        better: lower or higher.
        alpha: probability of passing a candidate that is worse by more.

    Raises:
        AssertionError: with the difference, its interval, and about how many more pairs would show it.
        ValueError: if the seeds differ, a figure is not finite, all pairs are one pair, or an argument is invalid.

    Example:
        >>> from headwise.testing import assert_not_worse
        >>> main = [3.20, 3.21, 3.19, 3.20, 3.19]
        >>> assert_not_worse([3.20, 3.22, 3.18, 3.20, 3.19], main, margin=0.05)
    """
    if better not in ("lower", "higher"):
        raise ValueError(f"better must be lower or higher, got {better!r}")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha!r}")
    if margin == math.inf:
        raise ValueError("margin must be a number, got inf: it would pass anything")
    if not margin > 0:
        raise ValueError(f"margin must be above 0, got {margin!r}: no number of runs shows that nothing is lost")
    sign = 1 if better == "lower" else -1
    pairs = _pairs(candidate, baseline)
    if not pairs:
        raise ValueError("there are no runs: give one of each arm for every seed")
    for number, pair in enumerate(pairs, 1):
        if not all(abs(figure) <= LARGEST for figure in pair):
            raise ValueError(f"pair {number} is {pair}: a run that diverged has no figure")
    if len(pairs) > 1 and len(set(pairs)) == 1 and pairs[0][0] != pairs[0][1]:
        raise ValueError(f"all {len(pairs)} pairs are {pairs[0]}: they repeat one run. Do the runs read their seed?")
    sample = paired([sign * (mine - other) for mine, other in pairs])
    half = half_width(sample, alpha)
    if sample.mean + half < margin:
        return
    verdict = "is worse" if sample.mean - half > margin else "is not shown to be no worse"
    told = f"the candidate {verdict} by more than {margin:g}: it loses {sample.mean:.4g}"
    raise AssertionError(f"{told} [{sample.mean - half:.4g}, {sample.mean + half:.4g}]{_more(sample, margin, alpha)}")


def _pairs(candidate: Figures, baseline: Figures) -> list[tuple[float, float]]:
    if isinstance(candidate, Mapping) and isinstance(baseline, Mapping):
        if candidate.keys() != baseline.keys():
            only = sorted(map(str, candidate.keys() ^ baseline.keys()))
            raise ValueError(f"seeds {', '.join(only)} have a run in one arm only: run both arms with each")
        return [(float(candidate[seed]), float(baseline[seed])) for seed in candidate]
    if isinstance(candidate, Mapping) or isinstance(baseline, Mapping):
        raise ValueError("give both arms by seed, or both as sequences in the same order of seeds")
    if len(candidate) != len(baseline):
        raise ValueError(f"there are {len(candidate)} runs and {len(baseline)}: give one of each arm for every seed")
    return [(float(mine), float(other)) for mine, other in zip(candidate, baseline, strict=True)]


def _more(sample: Sample, margin: float, alpha: float) -> str:
    """Return about how many more pairs would show it if mean and spread stay; "" if none would."""
    if sample.freedom < 1:
        return "; one pair shows nothing: run at least four"
    more = further(sample, alpha, lambda low, high: high < margin)
    return f"; about {more} more pairs would show it" if more else ""
