"""The matrix of a study whose runs have several phases: each evaluation after each phase, for example an accuracy
matrix."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.results.analysis_record import Analysis, ArmAnalysis
from headwise.results.records import StudyRecord


@dataclass(frozen=True)
class PhaseMatrix:
    """Hold the phases, the evaluations made after them, and the metric whose means over seeds are the entries."""

    metric: str
    phases: tuple[str, ...]
    evaluations: tuple[str, ...]

    def entry(self, arm: ArmAnalysis, phase: str, evaluation: str) -> float | None:
        """Return the mean over seeds of an entry; None where it was not recorded."""
        found = arm.metrics.get(f"{phase}/{evaluation}/{self.metric}")
        return None if found is None else found.mean


def phase_matrix(study: StudyRecord, analysis: Analysis) -> PhaseMatrix | None:
    """Return the matrix of the deciding metric; None where no evaluation was made after several phases."""
    metric = study.primary.rpartition("/")[2]
    cells: dict[tuple[str, str], None] = {}
    for name in analysis.outcomes:
        place, _, kind = name.rpartition("/")
        phase, _, evaluation = place.partition("/")
        # the name of an evaluation may hold a slash itself
        if kind == metric and evaluation in study.evaluations and place not in study.evaluations:
            cells[phase, evaluation] = None
    phases = tuple(dict.fromkeys(phase for phase, _ in cells))
    evaluations = tuple(dict.fromkeys(evaluation for _, evaluation in cells))
    return PhaseMatrix(metric, phases, evaluations) if len(phases) > 1 else None
