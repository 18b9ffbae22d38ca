"""Runs of different seeds that are one run: the seed set nothing, or one run's numbers were written down several times.

Copies have no spread, so any difference between two arms of copies would pass every test. Figures that independent runs
may share by chance are no sign of copies: accuracies on few examples, rounded figures, and the ends of a scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import combinations
from typing import NamedTuple

DATA = "data/"
WEIGHTS = "weights"
# runs of an arm from which on equal figures are no chance
FEWEST = 3
# digits that a loss, any other loss-like figure, and a score must have for these many runs not to share it by chance
LOSS_DIGITS, DIGITS, SCORE_DIGITS = 6, 4, 3
# a share of at most so many examples is coarse, whatever the digits of the quotient
FEW_EXAMPLES = 50


class Trace(NamedTuple):
    """What a run left: outcomes, the figures of its curve in their order, and digests of its weights and batches."""

    figures: Mapping[str, float]
    curve: Sequence[Mapping[str, float | None]] = ()
    evidence: Mapping[str, str] = {}


def copied(
    arms: Mapping[str, Mapping[int, Trace]], scores: Iterable[str], losses: Iterable[str], *, seeded: bool
) -> dict[str, str]:
    """Return, by arm, which of its seeds are copies of one run, and by what.

    `arms` holds the traces by arm and seed, `scores` the outcomes of which a higher value is better, `losses` those of
    which a lower one is and that are no shares. `seeded`: whether the study itself set the seeds of its runs.
    """
    kinds = set(scores), set(losses)
    found: dict[str, str] = {}
    for arm, runs in arms.items():
        for tell in (_by_start, _by_curve, _by_figures):
            if words := tell(runs, *kinds):
                found.setdefault(arm, words)
    if words := _everywhere(arms, kinds[0], coarse=not seeded):
        found = dict.fromkeys((arm for arm, runs in arms.items() if len(runs) > 1), words) | found
    return found


def same_start(runs: Mapping[int, Trace]) -> bool:
    """Return whether the runs began with the same weights, as those of a pretrained model, and showed no data."""
    digests = [run.evidence.get(WEIGHTS) for run in runs.values()]
    return len(digests) > 1 and None not in digests and len(set(digests)) == 1 and not any(map(_batches, runs.values()))


def _by_start(runs: Mapping[int, Trace], *_: set[str]) -> str:
    def alike(one: Trace, other: Trace) -> bool:
        shared = _batches(one).keys() & _batches(other).keys()
        weights = one.evidence.get(WEIGHTS)
        return (
            weights is not None
            and weights == other.evidence.get(WEIGHTS)
            and bool(shared)
            and all(one.evidence[name] == other.evidence[name] for name in shared)
        )

    return _told(_alike(runs, alike), "begin with the same weights and the same batches")


def _by_curve(runs: Mapping[int, Trace], *_: set[str]) -> str:
    # a curve that stays where it is, such as that of a model that predicts one class, is no sign
    moving = {
        seed: run
        for seed, run in runs.items()
        if len({value for line in run.curve for value in line.values() if _digits(value) >= LOSS_DIGITS}) > 1
    }
    return _told(_alike(moving, lambda one, other: list(one.curve) == list(other.curve)), "have the same curve")


def _by_figures(runs: Mapping[int, Trace], scores: set[str], losses: set[str]) -> str:
    def exactly(one: Trace, other: Trace) -> bool:
        return _equal(one, other) and any(_digits(one.figures.get(name)) >= LOSS_DIGITS for name in losses)

    if words := _told(_alike(runs, exactly), "have the same figures"):
        return words
    recorded = {seed: run for seed, run in runs.items() if run.figures}
    first = next(iter(recorded.values()), None)
    if first is None or len(recorded) < FEWEST or not all(_equal(first, run) for run in recorded.values()):
        return ""
    return _told(list(recorded), "have the same figures") if _is_fine(first, scores) else ""


def _everywhere(arms: Mapping[str, Mapping[int, Trace]], scores: set[str], *, coarse: bool) -> str:
    """Return which seeds have the same figures as one another in every arm, where that is no chance.

    With `coarse`, coarse figures count too if no arm has any spread, unless they are at the ends of their scale.
    """
    recorded = [{seed: run for seed, run in runs.items() if run.figures} for runs in arms.values()]
    recorded = [runs for runs in recorded if runs]
    seeds = sorted(set.intersection(*map(set, recorded))) if len(recorded) > 1 else []
    if len(seeds) < FEWEST:
        return ""
    if coarse and all(_equal(one, other) for runs in recorded for one, other in combinations(runs.values(), 2)):
        firsts = [next(iter(runs.values())) for runs in recorded]
        differ = any(not _equal(firsts[0], one) for one in firsts)
        inside = any(_depth(value) for one in firsts for value in one.figures.values())
        if differ and inside:
            return _told(seeds, "have the same figures in every arm")
    twice = {
        seed
        for pair in combinations(seeds, 2)
        if all(_equal(*(runs[one] for one in pair)) and _is_fine(runs[pair[0]], scores) for runs in recorded)
        for seed in pair
    }
    return _told(sorted(twice), "have the figures of other seeds in every arm") if 2 * len(twice) >= len(seeds) else ""


def _alike(runs: Mapping[int, Trace], alike) -> list[int]:  # type: ignore[no-untyped-def]
    """Return the first seeds that are alike."""
    for seed, run in runs.items():
        others = [other for other, its in runs.items() if other != seed and alike(run, its)]
        if others:
            return [seed, *others]
    return []


def _equal(one: Trace, other: Trace) -> bool:
    """Return whether two runs recorded the same outcomes with the same values."""
    return bool(one.figures) and one.figures == other.figures


def _batches(run: Trace) -> dict[str, str]:
    return {name: digest for name, digest in run.evidence.items() if name.startswith(DATA)}


def _is_fine(run: Trace, scores: set[str]) -> bool:
    """Return whether a figure of a run is so fine that several runs do not share it by chance."""
    return any(_depth(value) >= (SCORE_DIGITS if name in scores else DIGITS) for name, value in run.figures.items())


def _depth(value: float) -> int:
    """Return the number of digits of a figure or of its distance from the end of a scale, whichever is smaller."""
    if value in (0.0, 1.0, 100.0):
        return 0
    end = 1.0 if 0 < value < 1 else 100.0 if 1 < value < 100 else None
    return min(_digits(value), LOSS_DIGITS if end is None else _digits(round(end - value, 12)))


def _digits(value: float | None) -> int:
    """Return the number of significant digits of a figure in double or single precision; 1 for a coarse share."""
    import numpy as np

    if value is None or not np.isfinite(value):
        return 0
    coarse = float(Fraction(value).limit_denominator(FEW_EXAMPLES))
    if abs(coarse - value) <= 1e-7 * abs(value):
        return 1
    texts = [repr(float(value)), *([str(np.float32(value))] if float(np.float32(value)) == value else [])]
    return min(len(Decimal(text).normalize().as_tuple().digits) for text in texts)


def _told(seeds: Sequence[int], words: str) -> str:
    if not seeds:
        return ""
    named = [str(seed) for seed in seeds]
    return f"seeds {', '.join(named[:-1])} and {named[-1]} {words}"
