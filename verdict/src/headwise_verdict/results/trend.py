"""Tests of whether an outcome rises or falls along an axis of arms, within seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headwise_verdict.results.analysis_record import TrendRecord
from headwise_verdict.results.joint_flips import sign_flip
from headwise_verdict.results.records import AxisRecord, Outcome

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headwise_verdict.results.folder import StudyFolder
    from headwise_verdict.results.joint_flips import Table


class Trend(NamedTuple):
    """The change of an outcome from one value of an axis to the next, as the mean over seeds, with two p-values.

    `p` comes from the sign-flip test of the seeds' slopes, `page` from Page's test for ordered alternatives, which
    uses ranks only. Both are two-sided.
    """

    step: float
    p: float
    page: float
    seeds: int


def trend(outcomes: Table) -> Trend | None:
    """Return the trend of `outcomes` (seeds × values in their order); seeds with a missing figure are left out.

    The slope of a seed is that of the straight line over the ranks of the values, because most axes are geometric. None
    with fewer than three values or two seeds. Page 1963, doi 10.1080/01621459.1963.10500843.
    """
    import numpy as np

    complete = np.asarray(outcomes, dtype=float)
    complete = complete[np.isfinite(complete).all(axis=1)]
    if complete.shape[0] < 2 or complete.shape[1] < 3:
        return None
    by_seed = slopes(complete)
    return Trend(float(by_seed.mean()), sign_flip(by_seed.tolist()), _page(complete), len(complete))


def slopes(outcomes: Table) -> Table:
    """Return each seed's mean change from one value to the next; NaN for a seed with a missing figure."""
    import numpy as np

    at = np.arange(outcomes.shape[1]) - (outcomes.shape[1] - 1) / 2
    return outcomes @ at / (at**2).sum()


def _page(complete: NDArray[np.float64]) -> float:
    from scipy import stats

    ways = (complete, -complete)
    return min(1.0, 2 * min(float(stats.page_trend_test(way).pvalue) for way in ways))


def trends(study: StudyFolder, outcomes: dict[str, Outcome]) -> list[TrendRecord]:
    """Return the trend of every outcome along every axis; with too few values or seeds only its text is set."""
    names = [axis.name for axis in study.study.axes]
    # several sweeps of one setting differ in the rest of their arms, so their texts distinguish them
    labels = [axis.name if names.count(axis.name) == 1 or not axis.text else axis.text for axis in study.study.axes]
    return [
        _trend(study, axis, label, one) for axis, label in zip(study.study.axes, labels) for one in outcomes.values()
    ]


def _trend(study: StudyFolder, axis: AxisRecord, label: str, outcome: Outcome) -> TrendRecord:
    import numpy as np

    copies = next((f"{arm}: {study.copies[arm]}" for arm in axis.arms if arm in study.copies), "")
    order = np.argsort(axis.values, kind="stable")
    values, arms = [axis.values[at] for at in order], [axis.arms[at] for at in order]
    rows = [[study.figure(arm, seed, outcome.name) for arm in arms] for seed in study.seeds]
    table = np.array(rows, dtype=float)
    record = TrendRecord(axis=label, outcome=outcome.name, values=values, arms=arms)
    if copies:
        return record.model_copy(update={"text": copies})
    result = trend(table)
    if result is None:
        return record.model_copy(update={"text": "a trend needs three values and two seeds with all of them"})
    best = _best(table[np.isfinite(table).all(axis=1)].mean(axis=0), outcome.higher_is_better)
    update = {"step": result.step, "p": result.p, "page": result.page, "seeds": result.seeds}
    if best is not None:
        update |= {"best": values[best], "inside": 0 < best < len(values) - 1}
    return record.model_copy(update=update)


def _best(means, higher_is_better: bool | None) -> int | None:  # type: ignore[no-untyped-def]
    if higher_is_better is None:
        return None
    return int(means.argmax() if higher_is_better else means.argmin())
