"""The door from Python: `headwise.judge` of a table, of pairs of figures, or of differences."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
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
    bound: float | None = None,
    ledger: str | os.PathLike[str] | None = None,
) -> Decision:
    """Return whether a change is accepted after these paired runs; ask as often as you like, the error rate holds.

    An iterator is read only until it decides: one that trains a pair at each step stops early. Keep a list of all
    differences and pass it again after each run to use it in your own loop.

    Args:
        source: path of a table with one row per run; or pairs (candidate, baseline), one for each seed; or their
            differences, candidate minus baseline.
        metric: for a table, the column to judge; with a ledger, the name of the figures.
        candidate, baseline: for a table or a ledger, the names of the two arms.
        better: lower or higher.
        margin: in the unit of the metric; differences within it count as none. 0: no answer is "equivalent".
        alpha: probability of a wrong answer over all looks together.
        budget: the most pairs; None: no limit.
        bound: largest difference that two runs can have, in the unit of the metric: the answer then holds for any
            noise. None: differences are taken as normal.
        ledger: file of all candidates, whose false discoveries are held at alpha, as by `headwise judge --ledger`; an
            iterator gets its level before it trains. None: this candidate alone is judged at alpha.

    Returns:
        The decision: `answer`, `mean`, `low`, `high`, `pairs`, `evidence`, `more`, `notes` and the exit `code`.

    Raises:
        ValueError: if there is no pair, a figure is not finite, or an argument is invalid.
        TypeError: for a mapping, whose keys would be read as differences.
        StudyError: if a table lacks a column or an arm, or holds a seed twice, a difference is larger than the bound,
            or the ledger was edited.

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
    rule = Rule(margin=margin, alpha=alpha, budget=budget, higher=better == "higher", bound=bound)
    if isinstance(source, (str, os.PathLike)):
        decide = _of_table(Path(source), metric, candidate, baseline)
    else:
        decide = _of_figures(source)
        if ledger is not None and (not metric or candidate == "candidate"):
            raise ValueError("a ledger keeps each candidate by its name: give metric='val_loss', candidate='lr=3e-4'")
    if ledger is None:
        return decide(rule)
    if not isinstance(ledger, (str, os.PathLike)):
        raise TypeError(f"ledger must be the path of a file, got {ledger!r}")
    from headwise_verdict.judging.ledger import Ledger

    trains = not isinstance(source, (str, os.PathLike, Sized))
    return Ledger(Path(ledger), f"{metric}:{better}", baseline).judged(candidate, rule, decide, trains=trains)


def _of_table(path: Path, metric: str, candidate: str, baseline: str) -> Callable[[Rule], Decision]:
    if not metric:
        raise ValueError("metric must name the column of the table to judge, such as metric='val_loss'")
    pairs = read_pairs(path, metric, candidate, baseline)
    differences = pairs.differences()
    if not differences:
        raise ValueError(f"{candidate} and {baseline} have no seed in common in {path}")
    return lambda rule: _of_all(differences, rule).noted(*pairs.notes)


def _of_figures(source: Any) -> Callable[[Rule], Decision]:
    if isinstance(source, Mapping):
        raise TypeError("source is a mapping: give its differences, or pairs of figures, in the order of the runs")
    if not isinstance(source, Iterable):
        raise TypeError(f"source must be the path of a table, pairs of figures or differences, got {source!r}")
    if not isinstance(source, Sized):
        return lambda rule: judge_differences(_differences(source), rule)
    differences = list(_differences(source))
    return lambda rule: _of_all(differences, rule)


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
