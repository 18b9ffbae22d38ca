"""The figures of a claim's test, taken from a study: paired differences by seed, as columns of a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwise_verdict.results.critical_rates import by_seed
from headwise_verdict.results.intervals import ENDLESS, Scale, scale_of
from headwise_verdict.results.records import AxisRecord, ClaimTest, Outcome, OutcomeNames
from headwise_verdict.results.trend import slopes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headwise_verdict.results.folder import StudyFolder
    from headwise_verdict.results.joint_flips import Table


@dataclass(frozen=True)
class Figures:
    """The differences (seeds × columns) of one test, the means that they compare, and the values of an axis."""

    columns: Table
    # means over the paired seeds: of the arm and what it is compared with, or of every value of an axis
    means: NDArray[np.float64]
    # the values of an axis in their order
    values: tuple[float, ...] = ()
    # where the differences end
    scale: Scale = ENDLESS


def gather(study: StudyFolder, test: ClaimTest, outcome: Outcome) -> Figures | str:
    """Return the figures of a test of a number, or the reason why there are none."""
    if test.outcome == OutcomeNames.CRITICAL_RATE:
        return _critical(study, test)
    axis = axis_of(study, test) if test.along_axis else None
    if test.along_axis and axis is None:
        return f"the axis {test.arm} was not run"
    absent = [arm for arm in (axis or test).arms if arm not in study.arms]
    if absent:
        return f"the arm {absent[0]} was not run"
    if words := _copied(study, (axis or test).arms):
        return words
    for name in filter(None, (test.outcome, test.against_outcome)):
        if not _recorded(study, name):
            return f"outcome {name} was not recorded"
    return _along(study, test, axis, outcome) if axis else _between(study, test, outcome)


def diverged_pairs(study: StudyFolder, test: ClaimTest) -> tuple[list[bool], list[bool]] | str:
    """Return, for every seed in which both runs ended, whether each diverged; or the reason why it is unknown."""
    absent = [arm for arm in (test.arm, test.against) if arm not in study.arms]
    if absent:
        return f"the arm {absent[0]} was not run"
    if words := _copied(study, (test.arm, test.against)):
        return words
    cells = [(study.runs.get((test.arm, seed)), study.runs.get((test.against, seed))) for seed in study.seeds]
    ended = [(one, other) for one, other in cells if one and other and one.result and other.result]
    return [one.status == "diverged" for one, _ in ended], [other.status == "diverged" for _, other in ended]


def axis_of(study: StudyFolder, test: ClaimTest) -> AxisRecord | None:
    """Return the axis that a test names, or None if the study has no such axis."""
    return next((axis for axis in study.study.axes if axis.text == test.arm), None)


def _copied(study: StudyFolder, arms: Iterable[str]) -> str:
    """Return which runs of these arms are copies of one run, or ""."""
    return next((f"{arm}: {study.copies[arm]}" for arm in arms if arm in study.copies), "")


def _recorded(study: StudyFolder, outcome: str) -> bool:
    if outcome == OutcomeNames.DIVERGED:
        return True
    return any(run.metric(outcome) is not None for run in study.runs.values())


def _table(study: StudyFolder, arms: list[str], outcome: str) -> Table:
    import numpy as np

    return np.array([[study.figure(arm, seed, outcome) for arm in arms] for seed in study.seeds], dtype=float)


def _critical(study: StudyFolder, test: ClaimTest) -> Figures | str:
    """Return the critical rates along the axis of a test, paired with those along another axis or with a level."""
    import numpy as np

    columns = []
    for text in test.arms:
        axis = next((one for one in study.study.axes if one.text == text), None)
        if axis is None or any(arm not in study.arms for arm in axis.arms):
            return f"the axis {text} was not run"
        if not axis.of_rates:
            return f"the axis {text} is not of learning rates"
        if words := _copied(study, axis.arms):
            return words
        columns.append(by_seed(study, axis))
    table = np.array(columns, dtype=float).T
    return _paired(table if test.level is None else np.column_stack([table, np.full(len(table), test.level)]))


def _between(study: StudyFolder, test: ClaimTest, outcome: Outcome) -> Figures:
    import numpy as np

    table = _table(study, [test.arm], test.outcome)
    scale = scale_of(outcome, table[np.isfinite(table)])
    if test.level is not None:
        other, others = np.full_like(table, test.level), Scale(test.level, test.level)
    else:
        name = test.against_outcome or test.outcome
        other = _table(study, [test.against], name)
        ends = scale_of(study.study.outcome(name), other[np.isfinite(other)])
        other, others = other + test.beyond, Scale(ends.low + test.beyond, ends.high + test.beyond)
    return _paired(np.concatenate([table, other], axis=1), scale.minus(others))


def _paired(table: Table, scale: Scale = ENDLESS) -> Figures:
    import numpy as np

    pairs = table[np.isfinite(table).all(axis=1)]
    means = pairs.mean(axis=0) if len(pairs) else np.full(2, np.nan)
    return Figures((table[:, 0] - table[:, 1])[:, None], means, scale=scale)


def _along(study: StudyFolder, test: ClaimTest, axis: AxisRecord, outcome: Outcome) -> Figures | str:
    import numpy as np

    order = np.argsort(axis.values, kind="stable")
    table = _table(study, [axis.arms[at] for at in order], test.outcome)
    complete = table[np.isfinite(table).all(axis=1)]
    means = complete.mean(axis=0) if len(complete) else np.full(table.shape[1], np.nan)
    values = tuple(axis.values[at] for at in order)
    if len(values) < (3 if test.says == "inside" else 2):
        return f"the axis {axis.text} has too few values"
    if test.says != "inside":
        return Figures(slopes(table)[:, None], means, values)
    if outcome.higher_is_better is None:
        return f"no direction of {outcome.label} is the good one"
    sign = 1 if outcome.higher_is_better else -1
    inner = sign * table[:, 1:-1]
    # gains of every inner value over the first, then over the last
    gains = np.concatenate([inner - sign * table[:, [0]], inner - sign * table[:, [-1]]], axis=1)
    ends = scale_of(outcome, complete.ravel())
    return Figures(gains, means, values, ends.minus(ends))
