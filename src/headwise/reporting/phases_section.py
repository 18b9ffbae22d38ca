"""Show each evaluation after each phase of runs that have several: one matrix for each arm."""

from __future__ import annotations

from headwise.pages.charts import heat_map
from headwise.pages.shell import Section, figure, grid
from headwise.reporting.words import shown, unit_of
from headwise.results.analysis_record import Analysis, ArmAnalysis
from headwise.results.phase_matrix import PhaseMatrix, phase_matrix
from headwise.results.records import StudyRecord


def phases_section(study: StudyRecord, analysis: Analysis) -> list[Section]:
    """Return the section of the matrices; none where no evaluation was made after several phases."""
    matrix = phase_matrix(study, analysis)
    if matrix is None:
        return []
    unit = unit_of(analysis.metric)
    intro = f"{analysis.metric.label.capitalize()} ({unit.name or matrix.metric}) after each phase, mean over seeds; all arms share one colour scale."
    rows = {arm.label: _rows(matrix, arm, unit.factor) for arm in analysis.arms}
    values = [row["value"] for found in rows.values() for row in found]
    domain = (min(values), max(values)) if values else (0.0, 1.0)
    charts = [_matrix(label, found, domain, matrix) for label, found in rows.items()]
    return [Section("After each phase", grid(charts, wide=True), intro)]


def _rows(matrix: PhaseMatrix, arm: ArmAnalysis, factor: float) -> list[dict]:
    cells = [(phase, evaluation) for phase in matrix.phases for evaluation in matrix.evaluations]
    found = [(phase, evaluation, shown(matrix.entry(arm, phase, evaluation), factor)) for phase, evaluation in cells]
    return [
        {"phase": phase, "evaluation": evaluation, "value": value}
        for phase, evaluation, value in found
        if value is not None
    ]


def _matrix(label: str, rows: list[dict], domain: tuple[float, float], matrix: PhaseMatrix):  # type: ignore[no-untyped-def]  # markup is untyped
    chart = heat_map(
        rows, x="evaluation", y="phase", value_title=matrix.metric, domain=domain, y_order=list(matrix.phases)
    )
    return figure(chart, title=label, name=f"{matrix.metric} after each phase, {label}")
