"""Put several studies of the same arms together, each a data set of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headwise.files.errors import StudyError
from headwise.results.analysis import analyse
from headwise.results.data_sets import Aggregate, aggregate


def across(folders: Sequence[str | Path]) -> dict[str, Aggregate]:
    """Return, per arm that all studies share, its mean standardised difference in the primary outcome; better is
    positive.

    Raises StudyError when the studies share no arm besides the baseline, or nothing sets the scale of one of them.
    """
    found = {Path(folder).resolve().name: analyse(folder) for folder in folders}
    if len(found) < len(folders):
        raise StudyError("Two of the folders have the same name, or are the same: give one folder for each data set.")
    shared = set.intersection(*({arm.label for arm in one.compared} for one in found.values()))
    if not shared:
        raise StudyError(f"{', '.join(found)} share no arm besides the baseline, so nothing can be put together.")
    first = next(iter(found.values()))
    results = {}
    for label in (arm.label for arm in first.compared if arm.label in shared):
        tables = {}
        for name, one in found.items():
            sign = -1 if one.metric.higher_is_better is False else 1
            entry = next(arm for arm in one.compared if arm.label == label).differences[one.primary]
            tables[name] = [sign * value for value in entry.by_seed.values()]
        try:
            results[label] = aggregate(tables)
        except ValueError as error:
            raise StudyError(f"{label}: {error}") from error
    return results


def across_words(found: dict[str, Aggregate]) -> list[str]:
    """Say in a sentence per arm what the data sets show together."""
    return [
        f"{label}: over {one.data_sets} data sets the paired difference is {one.mean:+.2f} standard deviations "
        f"[{one.low:+.2f}, {one.high:+.2f}] (positive is better; bootstrap over data sets and seeds)."
        for label, one in found.items()
    ]
