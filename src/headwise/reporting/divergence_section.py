"""Show which arms diverged, how often and how surely more often than the baseline: the first thing said where it happened."""

from __future__ import annotations

from headwise.pages.formats import p_value
from headwise.pages.shell import Cell, Column, Section, table
from headwise.results.analysis_record import Analysis, ArmAnalysis


def divergence_section(analysis: Analysis) -> list[Section]:
    """Return the section on divergence; empty when every run that ended has finished."""
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


def _row(arm: ArmAnalysis, seeds: int) -> list[Cell]:
    count, test = len(arm.runs.diverged), arm.divergence
    where = [f"seed {run.seed} at step {'?' if run.step is None else run.step}" for run in arm.runs.diverged]
    whys = dict.fromkeys(run.why for run in arm.runs.diverged if run.why)
    shown = Cell(f"{count} of {seeds}", count, tone="diverged" if count else "")
    last = Cell(", ".join(where) or "–", small="; ".join(whys))
    if test is None:
        return [Cell(arm.label), shown, Cell("–"), Cell("–"), Cell("–"), Cell("–"), last]
    tone = {"more often": "worse", "less often": "better"}.get(test.verdict, "plain")
    verdict = Cell(test.verdict, tone=tone)
    counts = [Cell(str(test.only_arm), test.only_arm), Cell(str(test.only_baseline), test.only_baseline)]
    return [Cell(arm.label), shown, verdict, Cell(p_value(test.p_corrected), test.p_corrected), *counts, last]
