"""Draw the paired differences: the forest plot of the primary outcome, and every outcome side by side."""

from __future__ import annotations

from headwise.pages.forest import forest, panel
from headwise.pages.shell import Section, figure, fold, grid, join
from headwise.reporting.answer_table import outcome_table
from headwise.reporting.words import differences_of, forest_row, label_of, qualities, titled, unit_of
from headwise.results.analysis_record import Analysis
from headwise.results.records import Outcome


def difference_sections(analysis: Analysis) -> list[Section]:
    """Return the forest plot of the primary outcome and, where there are more, the panels and tables of all outcomes."""
    return [*_forest(analysis), *_panels(analysis)]


def _forest(analysis: Analysis) -> list[Section]:
    metric = analysis.metric
    found = differences_of(analysis, metric.name)
    rows = [forest_row(label, entry, metric) for label, entry in found if entry.mean is not None]
    if not rows:
        return []
    direction = "right" if metric.higher_is_better else "left"
    intro = (
        f"Paired difference to the baseline in {metric.label} with its 95 % interval, which holds for all arms together; further "
        f"{direction} is better. A dot is a seed. A triangle marks a verdict, a square equivalence, a circle no evidence, a diamond too few seeds."
    )
    margin = None if analysis.margin is None else analysis.margin * unit_of(metric).factor
    left_out = [label for label, entry in found if entry.mean is None]
    caption = f"Not drawn, because no pair of runs finished: {', '.join(left_out)}. " if left_out else ""
    caption += f"Shaded: the declared margin, ±{margin:g} {unit_of(metric).difference}." if margin is not None else ""
    chart = forest(rows, title=titled(metric, difference=True), margin=margin)
    name = f"Paired differences in {metric.label}"
    return [Section("Paired differences", figure(chart, caption=caption.strip(), name=name), intro)]


def _panels(analysis: Analysis) -> list[Section]:
    others = [one for one in qualities(analysis) if one.name != analysis.primary]
    if not others or not analysis.compared:
        return []
    panels = [_panel(analysis, one) for one in qualities(analysis)]
    folds = [fold(label_of(one), outcome_table(analysis, one)) for one in others]
    intro = (
        "Every outcome by the same statistics: paired differences with intervals that hold for all arms together. Each outcome is "
        "corrected for the number of arms, not for the number of outcomes. ▲▼ without colour of good or bad: purple, no direction is good."
    )
    drawn = grid([one for one in panels if one is not None], wide=True)
    return [Section("All outcomes", join(drawn, *folds), intro)]


def _panel(analysis: Analysis, outcome: Outcome):  # type: ignore[no-untyped-def]
    found = differences_of(analysis, outcome.name)
    rows = [forest_row(label, entry, outcome) for label, entry in found if entry.mean is not None]
    if not rows:
        return None
    chart = panel(rows, title=unit_of(outcome).difference or "difference")
    return figure(chart, title=label_of(outcome), name=f"Differences in {label_of(outcome)}")
