"""The learning curves of a study: every arm against the baseline, held-out and train, with a band over seeds."""

from __future__ import annotations

import math
from typing import Any

from headwise.pages.formats import Unit
from headwise.pages.line_charts import curves
from headwise.pages.shell import Section, figure, fold, grid, join, legend, prose
from headwise.reporting.outcome_texts import unit_of
from headwise.results.analysis_record import Analysis
from headwise.results.folder import RunFolder, StudyFolder
from headwise.results.intervals import interval

BAND = "95 % interval (Student's t) of the mean over the finished seeds"
# number of arms whose curves are in open folds
OPEN = 9

Runs = list[RunFolder]


def learning_curves(study: StudyFolder, analysis: Analysis) -> list[Section]:
    """Return the section of learning curves: one row per arm, with the loss and the primary metric.

    Empty if no run recorded an epoch.
    """
    stored = {label: study.of(label) for label in study.arms}
    held_out = _held_out(study, stored)
    kinds = dict.fromkeys(["loss", analysis.primary.rpartition("/")[2]])
    quantities = [kind for kind in kinds if _records(stored, f"train/{kind}") or _records(stored, f"{held_out}/{kind}")]
    if not quantities:
        return []
    units = {kind: unit_of(study.study.outcome(f"test/{kind}")) for kind in quantities}
    series = {
        (label, kind): _series(stored[label], kind, held_out, units[kind].factor)
        for label in study.arms
        for kind in quantities
    }
    domains = {
        kind: _domain([row for (_, one), rows in series.items() if one == kind for row in rows]) for kind in quantities
    }
    drawn_arms = [label for label in study.arms if label != study.baseline] or [study.baseline]
    folds: list[Any] = []
    for label in drawn_arms:
        charts = [_chart(study, stored[label], series, label, kind, units[kind], domains[kind]) for kind in quantities]
        folds.append(fold(label, grid(charts, wide=True), opened=len(folds) < OPEN))
    entries = [
        (f"{who}, {split}", colour, split == "train") for who, colour in _roles(study) for split in (held_out, "train")
    ]
    intro = (
        f"Mean over seeds of every epoch; band: {BAND}. All arms share the axes. Diverged runs are drawn singly and "
        "end in a cross."
    )
    return [Section("Learning curves", join(legend(entries), *folds), intro)]


def _roles(study: StudyFolder) -> list[tuple[str, str]]:
    return [("arm", "--blue"), ("baseline", "--grey")] if len(study.arms) > 1 else [("baseline", "--grey")]


def _chart(study: StudyFolder, runs: Runs, series: dict, label: str, kind: str, unit: Unit, domain: Any) -> Any:
    words = kind.replace("_", " ")
    title = f"{words} ({unit.name})" if unit.name else words
    rows = [row | {"role": "baseline"} for row in series[study.baseline, kind]]
    if label != study.baseline:
        rows += [row | {"role": "arm"} for row in series[label, kind]]
    broken = [point for run in runs if run.status == "diverged" for point in _points(run, kind, unit.factor)]
    if not rows and not broken:
        return prose([f"{title}: no epoch of a run ended with a finite figure."], kind="note")
    return figure(
        curves(rows, x="epoch", y=title, domain=domain, broken=broken), name=f"Learning curve of {label}, {words}"
    )


def _held_out(study: StudyFolder, stored: dict[str, Runs]) -> str:
    main = study.study.primary.rpartition("/")[0]
    kind = study.study.primary.rpartition("/")[2]
    return main if _records(stored, f"{main}/loss") or _records(stored, f"{main}/{kind}") else "validation"


def _records(stored: dict[str, Runs], name: str) -> bool:
    return any(_finite(line.metrics.get(name)) for runs in stored.values() for run in runs for line in run.epochs)


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _series(runs: Runs, kind: str, held_out: str, factor: float) -> list[dict[str, Any]]:
    rows = []
    for split in (held_out, "train"):
        by_epoch: dict[int, list[float]] = {}
        for run in runs:
            for line in run.epochs if run.status == "finished" else ():
                value = line.metrics.get(f"{split}/{kind}")
                if value is not None and math.isfinite(value):
                    by_epoch.setdefault(line.epoch, []).append(value * factor)
        for epoch, values in sorted(by_epoch.items()):
            mean = interval(values, bootstrap_from=math.inf)
            row = {"x": epoch, "split": split, "dashed": split == "train"}
            rows.append(row | {"mean": mean.mean, "low": mean.low, "high": mean.high})
    return rows


def _points(run: RunFolder, kind: str, factor: float) -> list[dict[str, Any]]:
    points = [(line.epoch, value) for line in run.epochs if _finite(value := line.metrics.get(f"train/{kind}"))]
    divergence = run.result.divergence if run.result else None
    title = f"seed {run.seed}, diverged at step {divergence.step if divergence else '?'}"
    return [
        {"x": epoch, "value": value * factor, "run": title, "last": at == len(points) - 1}
        for at, (epoch, value) in enumerate(points)
        if value is not None
    ]


def _domain(rows: list[dict[str, Any]]) -> tuple[float, float] | None:
    """Return the range of the means plus a margin, limited to the bands' range.

    Full bands are not used, because those of two seeds are so wide that every mean would look the same.
    """
    means = [row["mean"] for row in rows]
    if not means:
        return None
    ends = means + [row[key] for row in rows for key in ("low", "high") if row[key] is not None]
    margin = 0.25 * (max(means) - min(means)) or 0.5
    low, high = max(min(ends), min(means) - margin), min(max(ends), max(means) + margin)
    return (low, high) if high > low else None
