"""Say of every arm how many of its runs diverged, and test it against the baseline."""

from __future__ import annotations

from typing import Literal

from headwise.results.analysis_record import DivergedRun, DivergenceTest
from headwise.results.folder import StudyFolder
from headwise.results.intervals import ALPHA
from headwise.results.mcnemar import holm, mcnemar

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
    """Return McNemar's exact test per arm other than the baseline, corrected by Holm; empty when no run diverged.

    Seeds in which either run is missing are no pair.
    """
    others = [arm for arm in study.arms if arm != study.baseline]
    if not any(run.status == "diverged" for run in study.runs.values()):
        return {}
    pairs = {arm: _pairs(study, arm) for arm in others}
    p = [mcnemar(*pairs[arm]) for arm in others]
    return {arm: _test(*pairs[arm], one, all_) for arm, one, all_ in zip(others, p, holm(p))}


def _pairs(study: StudyFolder, arm: str) -> tuple[list[bool], list[bool]]:
    cells = [(study.runs.get((arm, seed)), study.runs.get((study.baseline, seed))) for seed in study.seeds]
    ended = [(one, base) for one, base in cells if one and base and one.result and base.result]
    return [one.status == "diverged" for one, _ in ended], [base.status == "diverged" for _, base in ended]


def _test(ours: list[bool], base: list[bool], p: float, corrected: float) -> DivergenceTest:
    only_arm = sum(one and not other for one, other in zip(ours, base))
    only_base = sum(other and not one for one, other in zip(ours, base))
    decided: Verdict = "more often" if only_arm > only_base else "less often"
    verdict: Verdict = decided if corrected < ALPHA else "no evidence"
    return DivergenceTest(only_arm=only_arm, only_baseline=only_base, p=p, p_corrected=corrected, verdict=verdict)
