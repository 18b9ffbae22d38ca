"""The diverged runs of every arm, their tests, and the critical learning rate of every seed along a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from headwise.results.analysis_record import CriticalRate, DivergedRun, DivergenceTest
from headwise.results.folder import StudyFolder
from headwise.results.intervals import ALPHA, JointIntervals, families, interval
from headwise.results.joint_flips import joint_pairs_test
from headwise.results.records import DIVERGED, AxisRecord

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headwise.results.joint_flips import Table


RATE = "learning_rate"


def is_of_rates(axis: AxisRecord) -> bool:
    """Return whether an axis is of learning rates."""
    return axis.name.rpartition(".")[2] == RATE and min(axis.values) > 0


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
    return [critical_rate(rates, [study.figure(axis.arms[at], seed, DIVERGED) for at in order]) for seed in study.seeds]


def critical_rates(study: StudyFolder) -> list[CriticalRate]:
    """Return the critical rate along every axis of learning rates and its distance from the first axis's in decades.

    The list is empty if no run diverged.
    """
    import numpy as np

    axes = [axis for axis in study.study.axes if is_of_rates(axis)]
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
    updated = list(records)
    for columns in families(differences) if records else []:
        joint = JointIntervals(differences[:, columns])
        parts = zip(columns, joint.bounds(ALPHA), joint.p_zero(), joint.means, joint.pairs)
        for at, bounds, p, mean, pairs in parts:
            fields = {"against": first, "pairs": int(pairs)}
            fields |= {"difference": float(mean), "difference_low": bounds.low, "difference_high": bounds.high, "p": p}
            updated[at] = updated[at].model_copy(update=fields if pairs else {"against": first})
    return updated


Verdict = Literal["more often", "less often", "no evidence"]


def diverged_runs(study: StudyFolder, arm: str) -> list[DivergedRun]:
    """Return the runs of an arm that diverged, in the order of the seeds."""
    runs = []
    for run in study.of(arm):
        if run.result is not None and run.status == "diverged":
            divergence = run.result.divergence
            step, why = (divergence.step, divergence.why) if divergence else (None, "")
            runs.append(DivergedRun(seed=run.seed, step=step, why=why, run=run.path.name))
    return runs


def divergence_tests(study: StudyFolder) -> dict[str, DivergenceTest]:
    """Return McNemar's exact test per arm other than the baseline, corrected by joint flips of all arms.

    Empty if no run diverged. Seeds in which either run is missing form no pair.
    """
    import numpy as np

    others = [arm for arm in study.arms if arm != study.baseline]
    if not others or not any(run.status == "diverged" for run in study.runs.values()):
        return {}
    table = np.array([[_minus(study, arm, seed) for arm in others] for seed in study.seeds], dtype=float)
    tests = joint_pairs_test(table)
    columns = [table[:, at][np.isfinite(table[:, at])] for at in range(len(others))]
    return {arm: _test(*one) for arm, *one in zip(others, columns, tests.alone, tests.corrected)}


def _minus(study: StudyFolder, arm: str, seed: int) -> float:
    ours, base = (study.figure(name, seed, DIVERGED) for name in (arm, study.baseline))
    return float("nan") if ours is None or base is None else ours - base


def _test(differences: NDArray[np.float64], p: float, corrected: float) -> DivergenceTest:
    only_arm, only_base = int((differences > 0).sum()), int((differences < 0).sum())
    decided: Verdict = "more often" if only_arm > only_base else "less often"
    verdict: Verdict = decided if corrected < ALPHA else "no evidence"
    return DivergenceTest(only_arm=only_arm, only_baseline=only_base, p=p, p_corrected=corrected, verdict=verdict)


def mcnemar(ours: Sequence[bool], base: Sequence[bool]) -> float:
    """Return the two-sided p of McNemar's exact test, from the seeds in which only one of both runs diverged.

    McNemar 1947, doi 10.1007/BF02295996; exact by the binomial distribution.
    """
    from scipy import stats

    only_ours = sum(one and not other for one, other in zip(ours, base, strict=True))
    only_base = sum(other and not one for one, other in zip(ours, base, strict=True))
    return float(stats.binomtest(only_ours, only_ours + only_base).pvalue) if only_ours + only_base else 1.0
