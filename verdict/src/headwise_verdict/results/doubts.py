"""What makes a comparison worth little although its tests are right: a baseline near chance, or one still improving."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headwise_verdict.pages.formats import unit_named

if TYPE_CHECKING:
    from headwise_verdict.results.folder import StudyFolder
    from headwise_verdict.results.records import MetricRecord

# a baseline within this share of the way from chance to the best is near chance
NEAR = 0.05
# numbers of classes at whose chance an accuracy is noticed if no chance was declared, and its relative distance
CLASSES, CLOSE = (2, 3, 4, 5, 10, 20, 50, 100, 1000), 0.02
# points of a curve from which on its end is judged, and the share of the whole fall that its last quarter may have
POINTS, STILL = 6, 0.1
# curves that are looked at, the first that was recorded
CURVES = ("validation/loss", "test/loss", "train/loss")


def baseline_doubts(study: StudyFolder) -> list[str]:
    """Return a sentence for each reason why differences from this baseline may not hold for a trained one."""
    runs = [run for run in study.of(study.baseline) if run.status == "finished"]
    values = [value for run in runs if (value := run.metric(study.study.primary)) is not None]
    name = study.study.primary.rpartition("/")[2]
    metric = next((one for one in study.study.metrics if one.name == name), None)
    doubts = []
    if values and metric is not None and (words := _chance(statistics.fmean(values), metric)):
        doubts.append(
            f"{study.baseline} is near chance: {study.study.outcome(study.study.primary).label} {words}. Effects on a "
            "model that has learned nothing may not carry over to one that has."
        )
    recorded = dict.fromkeys(key for run in runs for line in run.epochs for key in line.metrics)
    curve_name = next((one for one in CURVES if one in recorded), None)
    curves = [
        [value for line in run.epochs if (value := line.metrics.get(curve_name or "")) is not None] for run in runs
    ]
    falls = [fall for curve in curves if (fall := _still_falling(curve)) is not None]
    if falls and (middle := statistics.median(falls)) > STILL:
        doubts.append(
            f"{study.baseline} is still improving: the last quarter of its steps brought {middle:.0%} of the whole "
            f"fall of its {study.study.outcome(curve_name or '').label}. Longer training may change the "
            "verdicts.".replace("%", "\u00a0%")
        )
    return doubts


def _chance(mean: float, metric: MetricRecord) -> str:
    """Return a mean and the chance that it is near, in words, or ""."""
    unit = unit_named(metric.unit)
    chance, best = metric.failure, 1.0 if metric.higher_is_better else 0.0
    if chance is not None:
        # without an end of the scale, the way is that from 0
        way = abs(best - chance) if metric.unit == "%" or not metric.higher_is_better else abs(chance)
        gain = (mean - chance) * (1 if metric.higher_is_better else -1)
        near = way > 0 and gain <= NEAR * way
        return f"{unit.number(mean)} {unit.name}, chance {unit.number(chance)}".replace(" ,", ",") if near else ""
    named = metric.name.lower()
    classes = CLASSES if "acc" in named else CLASSES[:1] if "auc" in named or "auroc" in named else ()
    for many in classes if metric.higher_is_better else ():
        # an accuracy above 1 is in percent
        if abs(mean * many / (100 if mean > 1 else 1) - 1) <= CLOSE:
            return f"{unit.number(mean)} {unit.name}".strip() + f", as of guessing among {many} classes"
    return ""


def _still_falling(curve: Sequence[float]) -> float | None:
    """Return the share of a curve's fall that is in its last quarter; None for a short curve or one without a fall."""
    if len(curve) < POINTS:
        return None
    quarter = max(1, len(curve) // 4)
    last, before = statistics.fmean(curve[-quarter:]), statistics.fmean(curve[-2 * quarter : -quarter])
    whole = curve[0] - last
    return (before - last) / whole if whole > 0 else None
