"""The critical learning rate of every seed along a sweep: the rate at which its runs begin to diverge."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from headwise_verdict.results.analysis_record import CriticalRate
from headwise_verdict.results.folder import StudyFolder
from headwise_verdict.results.intervals import ALPHA, JointIntervals, interval
from headwise_verdict.results.records import AxisRecord, OutcomeNames

if TYPE_CHECKING:
    from headwise_verdict.results.joint_flips import Table


def critical_rate(rates: list[float], diverged: list[float | None]) -> float:
    """Return log10 of the critical learning rate of one seed.

    `rates` ascend, and `diverged` holds 1, 0, or None for a missing run. The critical rate is the midpoint, in log10,
    between the first rate at which the run diverges and the rate before it. If no run diverges it is the highest rate,
    if all do the lowest: the true one is then outside the axis. NaN if a run at a lower rate is missing.
    """
    logs = [math.log10(rate) for rate in rates]
    for at, failed in enumerate(diverged):
        if failed is None:
            return math.nan
        if failed:
            return (logs[at] + logs[max(at - 1, 0)]) / 2
    return logs[-1]


def by_seed(study: StudyFolder, axis: AxisRecord) -> list[float]:
    """Return log10 of the critical rate along an axis of learning rates for every seed; NaN where it is unknown."""
    order = sorted(range(len(axis.values)), key=lambda at: axis.values[at])
    rates = [axis.values[at] for at in order]
    return [
        critical_rate(rates, [study.figure(axis.arms[at], seed, OutcomeNames.DIVERGED) for at in order])
        for seed in study.seeds
    ]


def critical_rates(study: StudyFolder) -> list[CriticalRate]:
    """Return the critical rate along every axis of learning rates and its distance from the first axis's in decades.

    The list is empty if no run diverged.
    """
    import numpy as np

    axes = [axis for axis in study.study.axes if axis.of_rates and not study.copies.keys() & set(axis.arms)]
    swept = {arm for axis in axes for arm in axis.arms}
    if not any(run.status == "diverged" and run.arm in swept for run in study.runs.values()):
        return []
    table = np.array([by_seed(study, axis) for axis in axes], dtype=float).T
    records = []
    for axis, column in zip(axes, table.T):
        rates = [float(one) for one in column if math.isfinite(one)]
        statistics = interval(rates, bootstrap_from=math.inf)
        record = CriticalRate(axis=axis.text or axis.name, rates=sorted(axis.values), **statistics.model_dump())
        seeds = {str(seed): float(one) for seed, one in zip(study.seeds, column) if math.isfinite(one)}
        records.append(record.model_copy(update={"by_seed": seeds}))
    return [records[0], *_against(records[0].axis, records[1:], table[:, 1:] - table[:, :1])] if records else []


def _against(first: str, records: list[CriticalRate], differences: Table) -> list[CriticalRate]:
    """Return the records with their differences from the first axis added; all axes are judged together."""
    if not records:
        return []
    joint, updated = JointIntervals(differences), []
    parts = zip(records, joint.bounds(ALPHA), joint.p_zero(), joint.means, joint.pairs)
    for record, bounds, p, mean, pairs in parts:
        fields = {"against": first, "pairs": int(pairs)}
        fields |= {"difference": float(mean), "difference_low": bounds.low, "difference_high": bounds.high, "p": p}
        updated.append(record.model_copy(update=fields if pairs else {"against": first}))
    return updated
