"""Say of every arm how many of its runs diverged, and test it against the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from headwise.results.analysis_record import DivergedRun, DivergenceTest
from headwise.results.folder import StudyFolder
from headwise.results.intervals import ALPHA
from headwise.results.joint_flips import joint_pairs_test
from headwise.results.outcome_names import DIVERGED

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Verdict = Literal["more often", "less often", "no evidence"]


def diverged_runs(study: StudyFolder, arm: str) -> list[DivergedRun]:
    """Return the runs of an arm that diverged, in the order of the seeds."""
    found = []
    for run in study.of(arm):
        if run.result is not None and run.status == "diverged":
            seen = run.result.divergence
            step, why = (seen.step, seen.why) if seen else (None, "")
            found.append(DivergedRun(seed=run.seed, step=step, why=why, run=run.path.name))
    return found


def divergence_tests(study: StudyFolder) -> dict[str, DivergenceTest]:
    """Return McNemar's exact test per arm other than the baseline, corrected by joint flips of all arms; empty when no
    run diverged.

    Seeds in which either run is missing are no pair.
    """
    import numpy as np

    others = [arm for arm in study.arms if arm != study.baseline]
    if not others or not any(run.status == "diverged" for run in study.runs.values()):
        return {}
    table = np.array([[_minus(study, arm, seed) for arm in others] for seed in study.seeds], dtype=float)
    found = joint_pairs_test(table)
    columns = [table[:, at][np.isfinite(table[:, at])] for at in range(len(others))]
    return {arm: _test(*one) for arm, *one in zip(others, columns, found.alone, found.corrected)}


def _minus(study: StudyFolder, arm: str, seed: int) -> float:
    ours, base = (study.figure(name, seed, DIVERGED) for name in (arm, study.baseline))
    return float("nan") if ours is None or base is None else ours - base


def _test(differences: NDArray[np.float64], p: float, corrected: float) -> DivergenceTest:
    only_arm, only_base = int((differences > 0).sum()), int((differences < 0).sum())
    decided: Verdict = "more often" if only_arm > only_base else "less often"
    verdict: Verdict = decided if corrected < ALPHA else "no evidence"
    return DivergenceTest(only_arm=only_arm, only_baseline=only_base, p=p, p_corrected=corrected, verdict=verdict)


def mcnemar(ours: Sequence[bool], base: Sequence[bool]) -> float:
    """Return the two-sided p of McNemar's exact test: of the seeds in which one of both diverged, as many on either
    side.

    McNemar 1947, doi 10.1007/BF02295996; exact by the binomial distribution.
    """
    from scipy import stats

    only_ours = sum(one and not other for one, other in zip(ours, base, strict=True))
    only_base = sum(other and not one for one, other in zip(ours, base, strict=True))
    return float(stats.binomtest(only_ours, only_ours + only_base).pvalue) if only_ours + only_base else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values corrected for their number by Holm's step-down procedure (Holm 1979), in the given order."""
    order = sorted(range(len(p_values)), key=lambda at: p_values[at])
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, at in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[at]))
        corrected[at] = highest
    return corrected
