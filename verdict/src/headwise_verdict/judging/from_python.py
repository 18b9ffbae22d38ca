"""The door from Python: `headwise.judge` of a table, of pairs of figures, or of differences."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import Any

from headwise_verdict.judging.decision import Decision, Rule, decide
from headwise_verdict.judging.decision import judge as judge_differences
from headwise_verdict.judging.evidence import paired
from headwise_verdict.judging.runs import read_pairs

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
    for number, difference in enumerate(differences, 1):
        if not math.isfinite(difference):
            raise ValueError(f"pair {number} has the difference {difference}: a run that diverged has no figure")
    samples = [paired(differences[:count]) for count in range(1, len(differences) + 1)]
    return decide(samples, len(differences), rule)


def _differences(source: Iterable[Any]) -> Iterator[float]:
    for number, one in enumerate(source, 1):
        if isinstance(one, (tuple, list)):
            if len(one) != 2:
                raise ValueError(f"pair {number} has {len(one)} figures: give (candidate, baseline)")
            yield float(one[0]) - float(one[1])
        else:
            yield float(one)
