"""Show the health of every head during training: heat maps over time beside the loss, and the alerts."""

from __future__ import annotations

import math

from headwise.pages.charts import heat_map
from headwise.pages.line_charts import lines
from headwise.pages.shell import Cell, Column, Section, figure, fold, grid, join, prose, table

READINGS = 16  # shown per run, evenly spaced, first and last included: more would not be told apart on a screen
# Drawn where more was read: what the alerts judge, and the plainest figures of entropy, logits and sinks. All of it would be megabytes.
DRAWN = (
    "attention_entropy entropy_share max_logit sink_mass token_cosine high_frequency effective_rank_qk effective_rank_vo output_norm "
    "head_redundancy"
).split()
ALERTS, FEW = 100, 12  # alerts listed at most; alerts listed without being unfolded


def health_sections(study) -> list[Section]:
    """Return the sections on health: alerts of every run, and heat maps of one run a method; empty when no run was watched."""
    watched = [(run, records) for label in study.methods for run in study.of(label) if (records := run.health())]
    if not watched:
        return []
    alerts = [(run, record) for run, records in watched for record in records if record.get("alert")]
    shown = {}
    for run, records in watched:
        shown.setdefault(run.method, (run, records))
    folds = [fold(f"{label}, seed {run.seed}", _maps(run, records)) for label, (run, records) in shown.items()]
    intro = (
        "Statistics of every attention head while training, for the first watched seed of each method (all are in the health.jsonl of "
        f"the runs). At most {READINGS} evenly spaced readings are drawn, and of more than {len(DRAWN)} statistics those that alerts judge."
    )
    return [Section("Health of the heads", join(_alerts(alerts, len(watched)), *folds), intro)]


def _alerts(alerts, watched: int):
    if not alerts:
        return prose([f"No alert was raised in {watched} watched run{'s' if watched != 1 else ''}."])
    columns = [Column("method"), Column("seed", number=True), Column("step", number=True), Column("alert")]
    columns.append(Column("what it says and what to do", wide=True))
    rows = [
        [run.method, run.seed, record.get("step"), record["alert"], _words(record)] for run, record in alerts[:ALERTS]
    ]
    raised = (
        f"{len(alerts)} alert{'s' if len(alerts) != 1 else ''} in {watched} watched run{'s' if watched != 1 else ''}"
    )
    left_out = (
        f"; the first {ALERTS} are listed, all are in the health.jsonl of the runs" if len(alerts) > ALERTS else ""
    )
    return fold(raised + left_out, table(columns, rows), opened=len(alerts) <= FEW)


def _words(record: dict) -> Cell:
    parts = [str(record[key]) for key in ("sentence", "remedy") if record.get(key)]
    return Cell("; ".join(parts) or None, small=str(record.get("source") or ""))


def _maps(run, records: list[dict]):
    readings = [record for record in records if not record.get("alert") and _number(record.get("value"))]
    by_statistic: dict[str, list[dict]] = {}
    for record in readings:
        by_statistic.setdefault(record["statistic"], []).append(record)
    names = list(by_statistic)
    if len(names) > len(DRAWN):
        names = [name for name in names if name in DRAWN] or names
    beside, rows = [_loss(run)], []
    for name in names:
        maps = _map(name, by_statistic[name])
        if len(maps) == 1:
            beside += maps
        else:
            rows.append(grid(maps, wide=True))
    return join(grid(beside, wide=True), *rows)


def _map(name: str, records: list[dict]) -> list:
    """Return one map, or two where heads are read more than once: every head over steps, and layer × head at a chosen step."""
    steps = thin(sorted({record["step"] for record in records}))
    shown, named = set(steps), _layers(records)
    rows = [
        {
            "layer": named(record),
            "head": _head(record),
            "step": record["step"],
            "value": float(f"{record['value']:.4g}"),
        }
        for record in records
        if record["step"] in shown
    ]
    title = _with_unit(name)
    style = {"value_title": title, "legend_title": "", "domain": _span([record["value"] for record in records])}
    if all(row["head"] == "all" for row in rows):
        return [
            figure(heat_map(rows, x="step", y="layer", packed=True, **style), title=title, caption="Layer over steps.")
        ]
    if len(steps) == 1:
        return [figure(heat_map(rows, **style), title=title, caption=f"Layer × head at step {steps[0]}.")]
    over_time = [
        {"layer · head": f"{row['layer']} · {row['head']}", "step": row["step"], "value": row["value"]} for row in rows
    ]
    every = heat_map(over_time, x="step", y="layer · head", packed=True, **style)
    chosen = heat_map(rows, reading="step", packed=True, **style)
    return [
        figure(every, title=title, caption="Every head over steps."),
        figure(chosen, title=title, caption="Layer × head at the chosen step."),
    ]


def thin(steps: list[int], most: int = READINGS) -> list[int]:
    """Return at most `most` of the steps, evenly spaced, the first and the last included."""
    if len(steps) <= most:
        return steps
    return [steps[round(at * (len(steps) - 1) / (most - 1))] for at in range(most)]


def _loss(run):
    rows = [
        {"step": record["step"], "loss": record[key], "split": key.removesuffix("_loss")}
        for record in run.epochs()
        for key in ("train_loss", "validation_loss", "test_loss")
        if _number(record.get(key)) and "step" in record
    ]
    if not rows:
        return prose(["This run recorded no loss."])
    return figure(
        lines(rows, x="step", y="loss", series="split"),
        title="loss (nats)",
        caption="At the end of every epoch, over steps.",
    )


def _with_unit(name: str) -> str:
    from headwise.statistics import STATISTICS

    words = name.replace("_", " ")
    return f"{words} ({STATISTICS[name].unit})" if name in STATISTICS else words


def _layers(records: list[dict]):
    """Return how a record's layer is named: by depth, or by its site where several sites share a depth (encoder and decoder)."""
    at_depth: dict[int, set[str]] = {}
    for record in records:
        at_depth.setdefault(record.get("depth"), set()).add(record.get("site"))
    if None in at_depth or any(len(sites) > 1 for sites in at_depth.values()):
        return lambda record: str(record.get("site"))
    return lambda record: record["depth"]


def _head(record: dict):
    if record.get("group") is not None:
        return f"group {record['group']}"
    return record["head"] if record.get("head") is not None else "all"


def _span(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _number(value) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
