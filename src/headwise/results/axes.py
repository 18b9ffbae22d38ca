"""Follow every outcome along the axes of a study: the arms that `--sweep` made of one setting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.results.analysis_record import TrendRecord
from headwise.results.records import AxisRecord, Outcome
from headwise.results.trend import trend

if TYPE_CHECKING:
    from headwise.results.folder import StudyFolder


def trends(study: StudyFolder, outcomes: dict[str, Outcome]) -> list[TrendRecord]:
    """Return the trend of every outcome along every axis; one without three values or two whole seeds says so."""
    names = [axis.name for axis in study.study.axes]
    # several sweeps of one setting are told apart by what else their arms are
    labels = [axis.name if names.count(axis.name) == 1 or not axis.text else axis.text for axis in study.study.axes]
    return [
        _trend(study, axis, label, one) for axis, label in zip(study.study.axes, labels) for one in outcomes.values()
    ]


def _trend(study: StudyFolder, axis: AxisRecord, label: str, outcome: Outcome) -> TrendRecord:
    import numpy as np

    order = np.argsort(axis.values, kind="stable")
    values, arms = [axis.values[at] for at in order], [axis.arms[at] for at in order]
    rows = [[study.figure(arm, seed, outcome.name) for arm in arms] for seed in study.seeds]
    table = np.array(rows, dtype=float)
    record = TrendRecord(axis=label, outcome=outcome.name, values=values, arms=arms)
    found = trend(table)
    if found is None:
        return record.model_copy(update={"text": "a trend needs three values and two seeds with all of them"})
    best = _best(table[np.isfinite(table).all(axis=1)].mean(axis=0), outcome.higher_is_better)
    update = {"step": found.step, "p": found.p, "page": found.page, "seeds": found.seeds}
    if best is not None:
        update |= {"best": values[best], "inside": 0 < best < len(values) - 1}
    return record.model_copy(update=update)


def _best(means, higher_is_better: bool | None) -> int | None:  # type: ignore[no-untyped-def]
    if higher_is_better is None:
        return None
    return int(means.argmax() if higher_is_better else means.argmin())
