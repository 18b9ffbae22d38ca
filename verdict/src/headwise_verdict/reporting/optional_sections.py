"""Sections that only some studies have: claims, phases, diverged runs, costs, statistics of heads, attention maps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headwise_verdict.pages.charts import around_zero, attention_maps, heat_map
from headwise_verdict.pages.formats import mebibytes, milliseconds, p_value
from headwise_verdict.pages.line_charts import against_cost
from headwise_verdict.pages.shell import Column, Section, TableCell, figure, fold, grid, join, table
from headwise_verdict.reporting.answer_table import figure_cell, outcome_table
from headwise_verdict.reporting.outcome_texts import brief_names, label_of, shown, unit_of
from headwise_verdict.results.analysis_record import Analysis, ArmAnalysis, JudgedClaim, JudgedPremise
from headwise_verdict.results.folder import RunFolder, StudyFolder
from headwise_verdict.results.records import LayerMaps, Outcome, StudyRecord


def phases_section(study: StudyRecord, analysis: Analysis) -> list[Section]:
    """Return the section of phase matrices; empty if no outcome was evaluated after several phases."""
    matrix = phase_matrix(study, analysis)
    if matrix is None:
        return []
    unit = unit_of(analysis.metric)
    intro = (
        f"{analysis.metric.label.capitalize()} ({unit.name or matrix.metric}) after each phase, mean over seeds; all "
        "arms share one colour scale."
    )
    rows_by_arm = {arm.label: _rows(matrix, arm, unit.factor) for arm in analysis.arms}
    values = [row["value"] for rows in rows_by_arm.values() for row in rows]
    domain = (min(values), max(values)) if values else (0.0, 1.0)
    charts = [_matrix(label, rows, domain, matrix) for label, rows in rows_by_arm.items()]
    return [Section("After each phase", grid(charts, wide=True), intro)]


def _rows(matrix: PhaseMatrix, arm: ArmAnalysis, factor: float) -> list[dict]:
    cells = [(phase, evaluation) for phase in matrix.phases for evaluation in matrix.evaluations]
    entries = [(phase, evaluation, shown(matrix.entry(arm, phase, evaluation), factor)) for phase, evaluation in cells]
    return [
        {"phase": phase, "evaluation": evaluation, "value": value}
        for phase, evaluation, value in entries
        if value is not None
    ]


def _matrix(label: str, rows: list[dict], domain: tuple[float, float], matrix: PhaseMatrix):  # type: ignore[no-untyped-def]  # markup is untyped
    chart = heat_map(
        rows, x="evaluation", y="phase", value_title=matrix.metric, domain=domain, y_order=list(matrix.phases)
    )
    return figure(chart, title=label, name=f"{matrix.metric} after each phase, {label}")


def divergence_section(analysis: Analysis) -> list[Section]:
    """Return the section on divergence; empty if no run diverged."""
    if not any(arm.runs.diverged for arm in analysis.arms):
        return []
    columns = [
        Column("arm"),
        Column("diverged", "of seeds", number=True),
        Column("verdict"),
        Column("exact p", "McNemar, corrected", number=True),
        Column("only this arm", number=True),
        Column("only the baseline", number=True),
        Column("seeds and steps", wide=True),
    ]
    rows = [_row(arm, len(analysis.seeds)) for arm in analysis.arms]
    marked = [at for at, arm in enumerate(analysis.arms) if arm.label == analysis.baseline]
    words = analysis.statistics
    intro = f"A run that diverged is a result. Tested by {words['divergence']}. Elsewhere: {words['difference']}."
    return [Section("Divergence", table(columns, rows, marked=marked, caption="Runs that diverged"), intro)]


def _row(arm: ArmAnalysis, seeds: int) -> list[TableCell]:
    count, test = len(arm.runs.diverged), arm.divergence
    places = [f"seed {run.seed} at step {'?' if run.step is None else run.step}" for run in arm.runs.diverged]
    reasons = dict.fromkeys(run.why for run in arm.runs.diverged if run.why)
    share = TableCell(f"{count} of {seeds}", count, tone="diverged" if count else "")
    last = TableCell(", ".join(places) or "–", small="; ".join(reasons))
    if test is None:
        return [TableCell(arm.label), share, TableCell("–"), TableCell("–"), TableCell("–"), TableCell("–"), last]
    tone = {"more often": "worse", "less often": "better"}.get(test.verdict, "plain")
    verdict = TableCell(test.verdict, tone=tone)
    counts = [TableCell(str(test.only_arm), test.only_arm), TableCell(str(test.only_baseline), test.only_baseline)]
    return [TableCell(arm.label), share, verdict, TableCell(p_value(test.p_corrected), test.p_corrected), *counts, last]


MAPS_INTRO = (
    "Weights of the first and the last layer after training on the first held-out example: queries from top to bottom, "
    "keys from left to right, the heads side by side. The maps of one layer share one colour scale."
)


def maps_section(study: StudyFolder) -> list[Section]:
    """Return the section of attention maps, of the first seed for which the baseline stored any; else empty."""
    for seed in study.seeds:
        plain = study.runs.get((study.baseline, seed))
        if plain is None or plain.maps is None:
            continue
        others = [study.runs[arm, seed] for arm in study.arms if arm != study.baseline and (arm, seed) in study.runs]
        parts = [fold(run.arm, grid(_pair(plain, run)), opened=at == 0) for at, run in enumerate(others) if run.maps]
        return [Section("Attention maps", join(*parts), f"{MAPS_INTRO} Seed {seed}.")] if parts else []
    return []


def _pair(plain: RunFolder, run: RunFolder) -> Iterator[Any]:
    assert plain.maps is not None and run.maps is not None
    for at, (baseline_layer, arm_layer) in enumerate(zip(plain.maps.layers, run.maps.layers, strict=False)):
        top = max(
            weight for layer in (baseline_layer, arm_layer) for head in layer.heads for row in head for weight in row
        )
        place = "last" if at else "first"
        # the names of exported files, by which kept pages show them
        yield _figure(plain.arm, baseline_layer, top, f"maps, {place} layer: {plain.arm} beside {run.arm}")
        yield _figure(run.arm, arm_layer, top, f"maps, {place} layer: {run.arm}")


def _figure(arm: str, layer: LayerMaps, top: float, name: str) -> Any:
    return figure(attention_maps(layer.heads, top=top), title=f"{arm}, layer {layer.depth}", name=name)


@dataclass(frozen=True)
class PhaseMatrix:
    """A matrix of phases × evaluations, whose entries are the means over seeds of a metric."""

    metric: str
    phases: tuple[str, ...]
    evaluations: tuple[str, ...]

    def entry(self, arm: ArmAnalysis, phase: str, evaluation: str) -> float | None:
        """Return the mean over seeds of an entry, or None if it was not recorded."""
        interval = arm.metrics.get(f"{phase}/{evaluation}/{self.metric}")
        return None if interval is None else interval.mean


def phase_matrix(study: StudyRecord, analysis: Analysis) -> PhaseMatrix | None:
    """Return the matrix of the primary metric, or None if it was not evaluated after several phases."""
    metric = study.parts(study.primary)[1]
    cells: dict[tuple[str, str], None] = {}
    for name in analysis.outcomes:
        place, kind = study.parts(name)
        phase, _, evaluation = place.partition("/")
        # the name of an evaluation may contain a slash itself
        if kind == metric and evaluation in study.evaluations and place not in study.evaluations:
            cells[phase, evaluation] = None
    phases = tuple(dict.fromkeys(phase for phase, _ in cells))
    evaluations = tuple(dict.fromkeys(evaluation for _, evaluation in cells))
    return PhaseMatrix(metric, phases, evaluations) if len(phases) > 1 else None


LABELS = 150  # width of the arms' names in pixels


def heads_section(analysis: Analysis) -> list[Section]:
    """Return the section on statistics of heads; empty if none was recorded as an outcome."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in analysis.outcomes.values():
        if outcome.kind == "heads":
            groups.setdefault(outcome.name.split("/")[1], []).append(outcome)
    if not groups:
        return []
    parts = []
    for statistic, outcomes in groups.items():
        maps = _maps(analysis, statistic, outcomes)
        tables = [outcome_table(analysis, outcome) for outcome in outcomes]
        parts.append(
            join(grid(maps, wide=True), fold(f"{statistic.replace('_', ' ')}: figures and tests", join(*tables)))
        )
    intro = (
        "Statistics of the attention heads on held-out data at the end of training, mean over seeds, by depth. All "
        "arms share one "
        "colour scale; next to it is the paired difference to the baseline, where ● marks one that the joint "
        "test decides."
    )
    return [Section("Heads by depth", join(*parts), intro)]


def _maps(analysis: Analysis, statistic: str, outcomes: list[Outcome]) -> list:
    words = statistic.replace("_", " ")
    values, differences = [], []
    for outcome in outcomes:
        layer = _layer_of(outcome)
        for arm in analysis.arms:
            mean, entry = arm.metrics[outcome.name].mean, arm.differences.get(outcome.name)
            if mean is not None:
                values.append({"arm": arm.label, "layer": layer, "value": float(f"{mean:.4g}")})
            if entry is not None and entry.mean is not None:
                decided = "●" if entry.verdict in ("higher", "lower", "better", "worse") else ""
                row = {"arm": arm.label, "layer": layer, "value": float(f"{entry.mean:.4g}")}
                differences.append(row | {"mark": decided, "verdict": entry.verdict_text})
    maps = [_map(values, words, [arm.label for arm in analysis.arms])]
    if differences:
        order = [arm.label for arm in analysis.compared]
        maps.append(_map(differences, f"{words}, difference to {analysis.baseline}", order, diverging=True))
    return maps


def _map(rows: list[dict], title: str, order: list[str], *, diverging: bool = False):  # type: ignore[no-untyped-def]
    style: dict = {"value_title": title, "legend_title": "", "label_limit": LABELS, "y_order": order}
    if diverging:
        style |= around_zero(rows) | {"mark": "mark", "tooltip": ["verdict"]}
    return figure(heat_map(rows, x="layer", y="arm", **style), title=title, name=title)


def _layer_of(outcome: Outcome) -> str:
    layer = outcome.name.split("/", 2)[2] if outcome.name.count("/") > 1 else label_of(outcome)
    return re.sub(r"^layer ", "", layer)


CLAIMS_INTRO = (
    "A claim holds if each of its tests holds at 5 %; it is contradicted where one of them does so in intervals that "
    "hold for all its tests together. Where a premise fails or is not shown, a claim is not testable here, whatever "
    "its interval says."
)
TONES = {"as published": "better", "contrary": "worse"}


def claims_section(claims: list[JudgedClaim], premises: list[JudgedPremise] | None = None) -> list[Section]:
    """Return the sections of claims and premises; empty if the study has no claims."""
    if not claims:
        return []
    columns = [Column("claim", wide=True), Column("verdict"), Column("published", wide=True), Column("ours", wide=True)]
    rows = [
        [
            claim.text,
            TableCell(
                claim.verdict_words,
                tone=TONES.get(claim.verdict, "plain"),
                small="; ".join(filter(None, [claim.why, claim.history_words])),
            ),
            TableCell(claim.published_words or "–", small=claim.source),
            claim.ours or "–",
        ]
        for claim in claims
    ]
    section = Section("Claims", table(columns, rows, caption="Claims that this study tests", sort=False), CLAIMS_INTRO)
    return [section, *_premises(premises or [])]


def _premises(premises: list[JudgedPremise]) -> list[Section]:
    if not premises:
        return []
    columns = [Column("premise", wide=True), Column("here"), Column("ours", wide=True)]
    rows = [[one.text or one.name, one.state, one.ours or "–"] for one in premises]
    return [
        Section(
            "Premises", table(columns, rows, caption="What must be true for the claims to mean anything", sort=False)
        )
    ]


# name, label and factor of the costs to draw, if measured and different between arms
COSTS = (
    ("seconds_per_step", "time per step (ms)", 1e3),
    ("inference_seconds_per_example", "inference per example (ms)", 1e3),
    ("peak_memory_bytes", "peak memory (MiB)", 2.0**-20),
    ("flops_per_step", "operations per step (10⁹)", 1e-9),
    ("parameters", "parameters (10³)", 1e-3),
)


def cost_section(analysis: Analysis) -> list[Section]:
    """Return the section on costs; empty if no cost was measured or the baseline is the only arm."""
    measured = [cost for cost in COSTS if any(arm.costs.get(cost[0]) is not None for arm in analysis.arms)]
    if not measured or not analysis.compared:
        return []
    charts = [_chart(analysis, *cost) for cost in measured if _varies(analysis, cost[0])]
    indicative = " Times are indicative: other runs shared the processor." if analysis.cost_is_indicative else ""
    unit = unit_of(analysis.metric).name
    place = f"{unit} of {analysis.metric.label}" if unit else analysis.metric.label
    intro = (
        f"Medians over seeds. The best outcome comes first; the numbers on the right are outcomes, in {place}. The "
        f"dashed line is the baseline.{indicative}"
    )
    body = join(grid(charts, wide=True), _table(analysis, measured))
    return [Section("Outcome against cost", body, intro)]


def _varies(analysis: Analysis, name: str) -> bool:
    costs = {arm.costs.get(name) for arm in analysis.arms} - {None}
    return len(costs) > 1


def _chart(analysis: Analysis, name: str, words: str, factor: float):  # type: ignore[no-untyped-def]
    unit, names = unit_of(analysis.metric), brief_names(analysis)
    rows = [
        {
            "label": arm.label,
            "brief": names[arm.label],
            "role": "baseline" if arm.label == analysis.baseline else "arm",
            "x": cost * factor,
            "text": unit.number(arm.metrics[analysis.primary].mean) or "–",
        }
        for arm in _best_first(analysis)
        if (cost := arm.costs.get(name)) is not None
    ]
    outcome = f"{analysis.metric.label} ({unit.name})" if unit.name else analysis.metric.label
    title = f"{words}, ← cheaper"
    return figure(against_cost(rows, x=title, outcome=outcome), name=f"{analysis.metric.label} against {words}")


def _best_first(analysis: Analysis) -> list[ArmAnalysis]:
    sign = 1 if analysis.metric.higher_is_better is False else -1
    means = {arm.label: arm.metrics[analysis.primary].mean for arm in analysis.arms}
    return sorted(analysis.arms, key=lambda arm: (means[arm.label] is None, sign * (means[arm.label] or 0.0)))


def _table(analysis: Analysis, measured: list[tuple[str, str, float]]):  # type: ignore[no-untyped-def]
    unit = unit_of(analysis.metric)
    columns = [Column("arm"), Column(analysis.metric.label, unit.name, number=True)]
    columns += [Column(words.partition(" (")[0], number=True) for _, words, _ in measured]
    rows = []
    for arm in analysis.arms:
        mean = arm.metrics[analysis.primary].mean
        cells = [TableCell(arm.label), figure_cell(unit.number(mean), mean, arm.all_diverged)]
        rows.append([*cells, *(_cost(name, arm.costs.get(name), arm.all_diverged) for name, _, _ in measured)])
    return table(columns, rows, caption="What every arm costs")


def _cost(name: str, value: float | None, diverged: bool) -> TableCell:
    if value is None:
        return figure_cell(None, None, diverged)
    if "seconds" in name:
        return TableCell(milliseconds(value), value)
    return TableCell(mebibytes(value) if name.endswith("bytes") else f"{value:,.0f}", value)
