"""Aggregates over several studies of the same arms, each on its own data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from headwise_verdict.files.errors import StudyError
from headwise_verdict.results.analysis import analyse


def across(folders: Sequence[str | Path]) -> dict[str, Aggregate]:
    """Return, per arm that all studies share, its mean standardised difference in the primary outcome.

    Positive is better. Raises StudyError if two folders have the same name, if the studies share no arm besides the
    baseline, if runs are copies of one run, or if the scale of a difference cannot be estimated.
    """
    analyses = {Path(folder).resolve().name: analyse(folder) for folder in folders}
    if len(analyses) < len(folders):
        raise StudyError("Two of the folders have the same name, or are the same: give one folder for each data set.")
    shared = set.intersection(*({arm.label for arm in analysis.compared} for analysis in analyses.values()))
    if not shared:
        raise StudyError(f"{', '.join(analyses)} share no arm besides the baseline, so nothing can be put together.")
    first = next(iter(analyses.values()))
    results = {}
    for label in (arm.label for arm in first.compared if arm.label in shared):
        tables = {}
        for name, analysis in analyses.items():
            sign = -1 if analysis.metric.higher_is_better is False else 1
            entry = next(arm for arm in analysis.compared if arm.label == label).differences[analysis.primary]
            if entry.copies:
                raise StudyError(f"{name}, {label}: {entry.copies}. Run it with seeds that act, or leave it out.")
            tables[name] = [sign * value for value in entry.by_seed.values()]
        try:
            results[label] = aggregate(tables)
        except ValueError as error:
            raise StudyError(f"{label}: {error}") from error
    return results


def across_words(aggregates: dict[str, Aggregate]) -> list[str]:
    """Return one sentence per arm on its aggregate over the data sets."""
    return [
        f"{label}: over {one.data_sets} data sets the paired difference is {one.mean:+.2f} standard deviations "
        f"[{one.low:+.2f}, {one.high:+.2f}] (positive is better; bootstrap over data sets and seeds)."
        for label, one in aggregates.items()
    ]


RESAMPLES = 9_999


class Aggregate(NamedTuple):
    """A mean difference in standard deviations of the pairs, its 95 % interval, and the number of data sets."""

    mean: float
    low: float
    high: float
    data_sets: int


def aggregate(differences: Mapping[str, Sequence[float]]) -> Aggregate:
    """Return the mean over data sets of the paired differences in units of their standard deviation.

    The bootstrap resamples data sets and the seeds within each, so the interval holds for another data set of the same
    kind, not only for these; its ends are percentiles. Raises ValueError for fewer than two data sets, and for one with
    fewer than three pairs or with equal differences, whose scale cannot be estimated.
    """
    import numpy as np

    if len(differences) < 2:
        raise ValueError(f"Results of {len(differences)} data set cannot be put together: give two or more.")
    tables = [np.asarray(list(values), dtype=float) for values in differences.values()]
    for name, table in zip(differences, tables):
        if len(table) < 3 or np.ptp(table) == 0:
            raise ValueError(
                f"{name} has {len(table)} pairs whose differences have a range of "
                f"{np.ptp(table) if len(table) else 0:g}: "
                "three pairs that differ are needed to set its scale. Run more seeds, or leave this data set out."
            )
    rng = np.random.default_rng(0)
    resampled = np.stack(
        [_standardised(table[rng.integers(0, len(table), (RESAMPLES, len(table)))]) for table in tables]
    )
    chosen = rng.integers(0, len(tables), (RESAMPLES, len(tables)))
    # shuffled per position, so that a data set drawn twice contributes two different draws of seeds
    order = np.stack([rng.permutation(RESAMPLES) for _ in tables], axis=1)
    means = resampled[chosen, order].mean(axis=1)
    low, high = np.percentile(means[np.isfinite(means)], [2.5, 97.5])
    observed = [float(_standardised(table[None])[0]) for table in tables]
    return Aggregate(float(np.mean(observed)), float(low), float(high), len(tables))


def _standardised(table):  # type: ignore[no-untyped-def]
    """Return the mean over the standard deviation of each row; NaN where a draw repeats a single seed."""
    import numpy as np

    spread = table.std(axis=1, ddof=1)
    # correction for few pairs, from which the ratio is biased upwards (Hedges 1981)
    correction = 1 - 3 / (4 * (table.shape[1] - 1) - 1)
    return np.divide(table.mean(axis=1), spread, out=np.full(len(table), np.nan), where=spread > 0) * correction
