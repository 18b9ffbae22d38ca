"""Show the outcomes of heads at the end of training, by depth: one colour scale for all arms, and the difference to the
baseline."""

from __future__ import annotations

import re

from headwise.pages.charts import heat_map
from headwise.pages.shell import Section, figure, fold, grid, join
from headwise.reporting.answer_table import outcome_table
from headwise.reporting.words import label_of
from headwise.results.analysis_record import Analysis
from headwise.results.records import Outcome

LABELS = 150  # pixels for the names of arms


def heads_section(analysis: Analysis) -> list[Section]:
    """Return the section on figures of heads; empty when none was recorded as an outcome."""
    groups: dict[str, list[Outcome]] = {}
    for one in analysis.outcomes.values():
        if one.kind == "heads":
            groups.setdefault(one.name.split("/")[1], []).append(one)
    if not groups:
        return []
    parts = []
    for statistic, found in groups.items():
        maps = _maps(analysis, statistic, found)
        tables = [outcome_table(analysis, one) for one in found]
        parts.append(
            join(grid(maps, wide=True), fold(f"{statistic.replace('_', ' ')}: figures and tests", join(*tables)))
        )
    intro = (
        "Statistics of the attention heads on held-out data at the end of training, mean over seeds, by depth. All "
        "arms share one "
        "colour scale; beside it the paired difference to the baseline, where ● marks one that the joint test decides."
    )
    return [Section("Heads by depth", join(*parts), intro)]


def _maps(analysis: Analysis, statistic: str, found: list[Outcome]) -> list:
    words = statistic.replace("_", " ")
    values, differences = [], []
    for one in found:
        where = _where(one)
        for arm in analysis.arms:
            mean, entry = arm.metrics[one.name].mean, arm.differences.get(one.name)
            if mean is not None:
                values.append({"arm": arm.label, "layer": where, "value": float(f"{mean:.4g}")})
            if entry is not None and entry.mean is not None:
                decided = "●" if entry.verdict in ("higher", "lower", "better", "worse") else ""
                row = {"arm": arm.label, "layer": where, "value": float(f"{entry.mean:.4g}")}
                differences.append(row | {"mark": decided, "verdict": entry.verdict_text})
    maps = [_map(values, words, [arm.label for arm in analysis.arms])]
    if differences:
        order = [arm.label for arm in analysis.compared]
        maps.append(_map(differences, f"{words}, difference to {analysis.baseline}", order, diverging=True))
    return maps


def _map(rows: list[dict], title: str, order: list[str], *, diverging: bool = False):  # type: ignore[no-untyped-def]
    style: dict = {"value_title": title, "legend_title": "", "label_limit": LABELS, "y_order": order}
    if diverging:
        farthest = max((abs(row["value"]) for row in rows), default=0.0) or 1.0
        style |= {"domain": (-farthest, farthest), "diverging": True, "mark": "mark", "tooltip": ["verdict"]}
    return figure(heat_map(rows, x="layer", y="arm", **style), title=title, name=title)


def _where(outcome: Outcome) -> str:
    last = outcome.name.split("/", 2)[2] if outcome.name.count("/") > 1 else label_of(outcome)
    return re.sub(r"^layer ", "", last)
