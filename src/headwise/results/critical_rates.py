"""The critical learning rate of every seed, where a rate is swept: how far it can rise before a run diverges.

It is paired by seed and has a size, where a count of diverged runs has neither. In log10, so that differences are
decades.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from headwise.results.analysis_record import CriticalRate
from headwise.results.intervals import ALPHA, interval
from headwise.results.outcome_names import DIVERGED
from headwise.results.records import AxisRecord
from headwise.results.simultaneous import JointIntervals, families

if TYPE_CHECKING:
    from headwise.results.folder import StudyFolder
    from headwise.results.joint_flips import Table

RATE = "learning_rate"


def is_of_rates(axis: AxisRecord) -> bool:
    """Return whether an axis is of learning rates."""
    return axis.name.rpartition(".")[2] == RATE and min(axis.values) > 0


def critical_rate(rates: list[float], diverged: list[float | None]) -> float:
    """Return log10 of the critical rate of one seed; `rates` rise, and `diverged` are 1, 0 or None of a missing run.

    It lies in the middle, in log10, of the first rate at which the run diverges and the one below. Where none does it
    is the highest rate, where all do the lowest: it lies beyond the axis then. NaN where a run below it is missing.
    """
    places = [math.log10(rate) for rate in rates]
    for at, failed in enumerate(diverged):
        if failed is None:
            return math.nan
        if failed:
            return (places[at] + places[max(at - 1, 0)]) / 2
    return places[-1]


def by_seed(study: StudyFolder, axis: AxisRecord) -> list[float]:
    """Return log10 of the critical rate along an axis of rates in every seed; NaN where it is not known."""
    order = sorted(range(len(axis.values)), key=lambda at: axis.values[at])
    rates = [axis.values[at] for at in order]
    return [critical_rate(rates, [study.figure(axis.arms[at], seed, DIVERGED) for at in order]) for seed in study.seeds]


def critical_rates(study: StudyFolder) -> list[CriticalRate]:
    """Return the critical rate along every axis of rates, and how many decades it lies from that of the first; none
    where no run diverged."""
    import numpy as np

    axes = [axis for axis in study.study.axes if is_of_rates(axis)]
    swept = {arm for axis in axes for arm in axis.arms}
    if not any(run.status == "diverged" and run.arm in swept for run in study.runs.values()):
        return []
    table = np.array([by_seed(study, axis) for axis in axes], dtype=float).T
    found = []
    for axis, column in zip(axes, table.T):
        known = [float(one) for one in column if math.isfinite(one)]
        level = interval(known, bootstrap_from=math.inf)
        record = CriticalRate(axis=axis.text or axis.name, rates=sorted(axis.values), **level.model_dump())
        seeds = {str(seed): float(one) for seed, one in zip(study.seeds, column) if math.isfinite(one)}
        found.append(record.model_copy(update={"by_seed": seeds}))
    return [found[0], *_against(found[0].axis, found[1:], table[:, 1:] - table[:, :1])] if found else []


def _against(first: str, records: list[CriticalRate], differences: Table) -> list[CriticalRate]:
    """Return the records with what separates them from the first axis, all of them judged together."""
    made = list(records)
    for columns in families(differences) if records else []:
        joint = JointIntervals(differences[:, columns])
        parts = zip(columns, joint.bounds(ALPHA), joint.p_zero(), joint.means, joint.pairs)
        for at, bounds, p, mean, pairs in parts:
            seen = {"against": first, "pairs": int(pairs)}
            seen |= {"difference": float(mean), "difference_low": bounds.low, "difference_high": bounds.high, "p": p}
            made[at] = made[at].model_copy(update=seen if pairs else {"against": first})
    return made
