"""The diverged runs of every arm, and tests of whether an arm diverges more or less often than the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from headwise_verdict.results.analysis_record import DivergedRun, DivergenceTest
from headwise_verdict.results.differences import without_a_verdict
from headwise_verdict.results.folder import StudyFolder
from headwise_verdict.results.intervals import ALPHA
from headwise_verdict.results.joint_flips import joint_pairs_test
from headwise_verdict.results.records import OutcomeNames

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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

    Empty if no run diverged. Seeds in which either run is missing form no pair. Arms whose runs are copies have none.
    """
    import numpy as np

    copies = without_a_verdict(study)
    others = [arm for arm in study.arms if arm != study.baseline and arm not in copies]
    if not others or not any(run.status == "diverged" for run in study.runs.values()):
        return {}
    table = np.array([[_minus(study, arm, seed) for arm in others] for seed in study.seeds], dtype=float)
    tests = joint_pairs_test(table)
    columns = [table[:, at][np.isfinite(table[:, at])] for at in range(len(others))]
    return {arm: _test(*one) for arm, *one in zip(others, columns, tests.alone, tests.corrected)}


def _minus(study: StudyFolder, arm: str, seed: int) -> float:
    ours, base = (study.figure(name, seed, OutcomeNames.DIVERGED) for name in (arm, study.baseline))
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
