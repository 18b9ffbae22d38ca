"""Pairs by evidence: whether runs of a seed began with the same weights and saw the same batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.results.records import RunResult

if TYPE_CHECKING:
    from headwise.results.folder import StudyFolder

DATA = "data/"
# the baseline again with draws of its own: it is no pair in these on purpose
CONTROL = "same"


def why_no_pair(one: RunResult, other: RunResult) -> str:
    """Say in which the evidence of two runs of a seed differs; nothing where it agrees, or where a run gave none."""
    if CONTROL in (one.arm, other.arm):
        return ""
    found = []
    ours, theirs = one.evidence, other.evidence
    if ours.get("weights", "") != theirs.get("weights", "") and "weights" in ours and "weights" in theirs:
        found.append("their initial weights differ")
    shared = sorted(int(name.removeprefix(DATA)) for name in ours.keys() & theirs.keys() if name.startswith(DATA))
    different = [count for count in shared if ours[f"{DATA}{count}"] != theirs[f"{DATA}{count}"]]
    if different:
        first = different[0]
        found.append(
            "their first batches differ"
            if first == 1
            else f"the order of their data differs within the first {first} batches"
        )
    return " and ".join(found)


def not_paired(study: StudyFolder) -> dict[str, str]:
    """Return the arms that are no pairs with the baseline, and why, from the first seed that shows it."""
    found: dict[str, str] = {}
    for arm in study.arms:
        for seed in study.seeds:
            runs = [study.runs.get((label, seed)) for label in (study.baseline, arm)]
            base, own = (run.result if run is not None else None for run in runs)
            why = why_no_pair(base, own) if base is not None and own is not None and arm != study.baseline else ""
            if why:
                found.setdefault(arm, f"seed {seed}: {why}")
    return found


def without_evidence(study: StudyFolder) -> bool:
    """Return whether runs of a script showed nothing of weights or data: that they are pairs is taken on trust."""
    results = [run.result for run in study.runs.values() if run.result is not None]
    return any("script" in result.config.get("settings", {}) and not result.evidence for result in results)
