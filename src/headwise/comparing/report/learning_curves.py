"""Draw the learning curves of a study: every method against the baseline, train and test, with a band over seeds."""

from __future__ import annotations

import math

from headwise.pages.formats import unit_of
from headwise.pages.line_charts import curves
from headwise.pages.shell import Section, figure, fold, grid, join, legend, prose

BAND = "95 % interval (Student's t) of the mean over the finished seeds"


def learning_curves(study, analysis: dict) -> list[Section]:
    """Return the section of learning curves: one row a method, loss and accuracy; empty when no run recorded an epoch."""
    stored = {label: [(run, run.epochs()) for run in study.of(label)] for label in study.methods}
    held_out, metric = _held_out(stored), analysis["metric"]
    kinds = dict.fromkeys(["loss", metric["name"].partition("_")[2]])
    quantities = [name for name in kinds if _records(stored, f"train_{name}") or _records(stored, f"{held_out}_{name}")]
    if not quantities:
        return []
    series = {
        (label, name): _series(stored[label], name, held_out, unit_of(f"test_{name}", metric).factor)
        for label in study.methods
        for name in quantities
    }
    domains = {
        name: _domain([row for (_, kind), rows in series.items() if kind == name for row in rows])
        for name in quantities
    }
    shown = [label for label in study.methods if label != study.baseline] or [study.baseline]
    folds = []
    for label in shown:
        charts = [_chart(study, stored[label], series, label, name, metric, domains[name]) for name in quantities]
        folds.append(fold(label, grid(charts, wide=True), opened=True))
    entries = [
        (f"{who}, {split}", colour, split == "train") for who, colour in _roles(study) for split in (held_out, "train")
    ]
    intro = f"Mean over seeds of every epoch; band: {BAND}. All methods share the axes. Diverged runs are drawn singly and end in a cross."
    return [Section("Learning curves", join(legend(entries), *folds), intro)]


def _roles(study) -> list[tuple[str, str]]:
    return [("method", "--blue"), ("baseline", "--grey")] if len(study.methods) > 1 else [("baseline", "--grey")]


def _chart(study, runs, series, label: str, name: str, metric: dict, domain):
    unit = unit_of(f"test_{name}", metric)
    title = f"{name.replace('_', ' ')} ({unit.name})" if unit.name else name.replace("_", " ")
    rows = [row | {"role": "baseline"} for row in series[study.baseline, name]]
    if label != study.baseline:
        rows += [row | {"role": "method"} for row in series[label, name]]
    broken = [
        point for run, epochs in runs if run.status == "diverged" for point in _points(run, epochs, name, unit.factor)
    ]
    if not rows and not broken:
        return prose([f"{title}: no epoch of a run ended with a finite figure."], kind="note")
    return figure(curves(rows, x="epoch", y=title, domain=domain, broken=broken))


def _held_out(stored) -> str:
    return "test" if _records(stored, "test_loss") else "validation"


def _records(stored, key: str) -> bool:
    return any(_number(record.get(key)) for runs in stored.values() for _, epochs in runs for record in epochs)


def _series(runs, name: str, held_out: str, factor: float) -> list[dict]:
    from headwise.comparing.results.analysis import interval

    rows = []
    for split in (held_out, "train"):
        by_epoch: dict[int, list[float]] = {}
        for run, epochs in runs:
            for record in epochs if run.status == "finished" else ():
                if _number(record.get(f"{split}_{name}")):
                    by_epoch.setdefault(record["epoch"], []).append(record[f"{split}_{name}"] * factor)
        for epoch, values in sorted(by_epoch.items()):
            found = interval(values, bootstrap_from=math.inf)
            row = {"x": epoch, "split": split, "dashed": split == "train"}
            rows.append(row | {key: found[key] for key in ("mean", "low", "high")})
    return rows


def _points(run, epochs, name: str, factor: float) -> list[dict]:
    key = f"train_{name}"
    kept = [record for record in epochs if _number(record.get(key))]
    title = f"seed {run.seed}, diverged at step {run.result.get('diverged_at_step')}"
    return [
        {"x": record["epoch"], "value": record[key] * factor, "run": title, "last": at == len(kept) - 1}
        for at, record in enumerate(kept)
    ]


def _domain(rows) -> tuple[float, float] | None:
    """Return the range of the means with a margin, no wider than the bands: two seeds have bands that would hide every mean."""
    means = [row["mean"] for row in rows]
    if not means:
        return None
    ends = means + [row[key] for row in rows for key in ("low", "high") if row[key] is not None]
    margin = 0.25 * (max(means) - min(means)) or 0.5
    low, high = max(min(ends), min(means) - margin), min(max(ends), max(means) + margin)
    return (low, high) if high > low else None


def _number(value) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
