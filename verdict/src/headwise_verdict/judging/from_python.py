"""The door from Python: `headwise.judge` of a table, of pairs of figures, or of differences."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

from headwise_verdict.judging.decision import Decision, Rule, of_differences
from headwise_verdict.judging.decision import judge as judge_differences
from headwise_verdict.judging.runs import LARGEST, read_pairs

DIRECTIONS = ("lower", "higher")


def judge(
    source: str | os.PathLike[str] | Iterable[float] | Iterable[tuple[float, float]],
    *,
    metric: str = "",
    candidate: str = "candidate",
    baseline: str = "baseline",
    better: str = "lower",
    margin: float = 0.0,
    alpha: float = 0.05,
    budget: int | None = None,
) -> Decision:
    """Return whether a change is accepted after these paired runs; ask as often as you like, the error rate holds.

    An iterator is read only until it decides: one that trains a pair at each step stops early. Keep a list of all
    differences and pass it again after each run to use it in your own loop.

    Args:
        source: path of a table with one row per run; or pairs (candidate, baseline), one for each seed; or their
            differences, candidate minus baseline.
        metric: for a table, the column to judge.
        candidate, baseline: for a table, the names of the two arms.
        better: lower or higher.
        margin: in the unit of the metric; differences within it count as none. 0: no answer is "equivalent".
        alpha: probability of a wrong answer over all looks together.
        budget: the most pairs; None: no limit.

    Returns:
        The decision: `answer`, `mean`, `low`, `high`, `pairs`, `evidence`, `more`, `notes` and the exit `code`.

    Raises:
        ValueError: if there is no pair, a figure is not finite, or an argument is invalid.
        TypeError: for a mapping, whose keys would be read as differences.
        StudyError: if a table lacks a column or an arm, or holds a seed twice.

    Example:
        >>> import headwise
        >>> pairs = [(3.11, 3.20), (3.13, 3.21), (3.09, 3.19), (3.12, 3.20), (3.10, 3.19)]
        >>> decision = headwise.judge(pairs, better="lower")
        >>> decision.answer, decision.pairs
        ('accept', 5)
    """
    for name, value in (("metric", metric), ("candidate", candidate), ("baseline", baseline)):
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a name, got {value!r}")
    if better not in DIRECTIONS:
        raise ValueError(f"better must be lower or higher, got {better!r}")
    rule = Rule(margin=margin, alpha=alpha, budget=budget, higher=better == "higher")
    if not isinstance(source, (str, os.PathLike)):
        if isinstance(source, Mapping):
            raise TypeError("source is a mapping: give its differences, or pairs of figures, in the order of the runs")
        if not isinstance(source, Iterable):
            raise TypeError(f"source must be the path of a table, pairs of figures or differences, got {source!r}")
        if not isinstance(source, Sized):
            return judge_differences(_differences(source), rule)
        return _of_all(list(_differences(source)), rule)
    if not metric:
        raise ValueError("metric must name the column of the table to judge, such as metric='val_loss'")
    pairs = read_pairs(Path(source), metric, candidate, baseline)
    differences = pairs.differences()
    if not differences:
        raise ValueError(f"{candidate} and {baseline} have no seed in common in {source}")
    return _of_all(differences, rule).noted(*pairs.notes)


def _of_all(differences: list[float], rule: Rule) -> Decision:
    """Return the decision after a look at each pair, of which the last may be later than the one that decided."""
    decision = judge_differences(differences, rule)
    if decision.pairs == len(differences):
        return decision
    return of_differences(differences, rule)


def _differences(source: Iterable[Any]) -> Iterator[float]:
    for number, one in enumerate(source, 1):
        # a row of an array is a pair, too
        pair = one if isinstance(one, (tuple, list)) or getattr(one, "ndim", 0) == 1 else (one, 0.0)
        if len(pair) != 2:
            raise ValueError(f"pair {number} has {len(pair)} figures: give (candidate, baseline)")
        yield _figure(number, pair[0]) - _figure(number, pair[1])


def _figure(number: int, written: Any) -> float:
    try:
        figure = float(written)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"pair {number} has {written!r:.60}, which is not a number") from None
    if not abs(figure) <= LARGEST:
        raise ValueError(
            f"pair {number} has {figure}: a run that diverged has no figure. Count it as the metric of a model that "
            "has learned nothing, or judge the share of runs that diverge."
        )
    return figure
