"""The report's section on health: the alerts, all arms by depth and by step, and every head of one run per arm."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from headwise_verdict.files.errors import count
from headwise_verdict.pages.charts import around_zero, heat_map
from headwise_verdict.pages.line_charts import lines
from headwise_verdict.pages.shell import Column, Section, TableCell, figure, fold, grid, join, prose, table
from headwise_verdict.results.folder import RunFolder, StudyFolder
from headwise_verdict.results.health_records import Alert, Record, alerts_among, figures_among

UNITS = {
    "attention_entropy": "nats",
    "entropy_share": "share of log(keys)",
    "lowest_entropy": "nats",
    "entropy_floor_centred": "nats",
    "entropy_floor_spectral": "nats",
    "max_logit": "nats",
    "logit_bound": "nats",
    "sink_mass": "share of weight",
    "peaked_rows": "share of queries",
    "head_redundancy": "cosine",
    "layer_redundancy": "cosine",
    "layer_redundancy_mean": "cosine",
    "token_cosine": "cosine",
    "high_frequency": "ratio",
    "stream_cosine": "cosine",
    "stream_high_frequency": "ratio",
    "final_cosine": "cosine",
    "final_high_frequency": "ratio",
    "nonlocal_functional": "squared units of v",
    "gradient_cosine": "cosine",
    "output_norm": "units of v",
    "query_norm": "units of q",
    "key_norm": "units of k",
    "value_norm": "units of v",
    "massive_activations": "largest over median",
    "attention_distance": "tokens",
    "later_keys": "share of later keys",
    "text_to_image_mass": "share of weight",
    "image_to_text_mass": "share of weight",
    "log_sum_exp": "nats",
    "largest_log_sum_exp": "nats",
    "min_logit": "nats",
    "top_key_distance": "tokens",
    "top_key_share": "share of queries",
    "sink_weight": "share of weight",
    "sink_closed": "share of queries",
    "sink_open": "share of queries",
    "gate_mean": "gate",
    "gate_closed": "share of gates",
    "gate_open": "share of gates",
    "attention_write": "share of the stream",
    "mlp_write": "share of the stream",
}


READINGS = 16  # drawn per run, evenly spaced, first and last included; more could not be distinguished on a screen
# The statistics drawn if more were recorded: those that alerts judge, and the plainest ones of entropy, logits and
# sinks. A page with all of them would take megabytes.
DRAWN = (
    "attention_entropy entropy_share max_logit sink_mass token_cosine high_frequency effective_rank_qk "
    "effective_rank_vo output_norm head_redundancy"
).split()

Records = list[Record]
Figures = dict[tuple[str, str, Any], list[float]]
Means = dict[tuple[str, str, Any], float]


class Readings:
    """The health records of a study: `alerts`, the first watched run of each arm, and means over heads and seeds.

    `by_layer` is the mean of the last reading per (arm, statistic, layer), `by_step` that of every step per (arm,
    statistic, step); `seeds` counts the watched runs of each arm.
    """

    def __init__(self, study: StudyFolder) -> None:
        self.of_script = study.study.of_script
        self.alerts: list[tuple[RunFolder, Alert]] = []
        self.first: dict[str, tuple[RunFolder, Records]] = {}
        self.seeds: dict[str, int] = defaultdict(int)
        layers: Figures = defaultdict(list)
        steps: Figures = defaultdict(list)
        for label in study.arms:
            for run in study.of(label):
                records = run.health()
                if not records:
                    continue
                self.seeds[label] += 1
                self.alerts += [(run, alert) for alert in alerts_among(records)]
                readings = [record for record in figures_among(records) if finite(record["value"])]
                self.first.setdefault(label, (run, readings))
                _add(label, readings, layers, steps)
        self.by_layer, self.by_step = _means(layers), _means(steps)

    @property
    def watched(self) -> int:
        """Return the number of runs that were watched."""
        return sum(self.seeds.values())

    def statistics(self) -> list[str]:
        """Return the names of the statistics to draw, in the order of the first run that recorded them."""
        names = list(dict.fromkeys(record["statistic"] for _, records in self.first.values() for record in records))
        if len(names) > len(DRAWN):
            return [name for name in names if name in DRAWN] or names
        return names

    def domain(self, statistic: str) -> tuple[float, float]:
        """Return the range of a statistic over the drawn runs of all arms, for a common colour scale."""
        return span([r["value"] for _, records in self.first.values() for r in records if r["statistic"] == statistic])


def _add(label: str, readings: Records, layers: Figures, steps: Figures) -> None:
    by_statistic: dict[str, Records] = defaultdict(list)
    for record in readings:
        by_statistic[record["statistic"]].append(record)
    for name, records in by_statistic.items():
        last, named = max(record["step"] for record in records), layer_names(records)
        for record in records:
            steps[label, name, record["step"]].append(record["value"])
            if record["step"] == last:
                layers[label, name, named(record)].append(record["value"])


def _means(figures: Figures) -> Means:
    return {key: math.fsum(values) / len(values) for key, values in figures.items()}


def layer_names(records: Records) -> Callable[[Record], Any]:
    """Return the function that names a record's layer: by depth, or by site if several sites share a depth."""
    at_depth: dict[Any, set[Any]] = {}
    for record in records:
        at_depth.setdefault(record.get("depth"), set()).add(record.get("site"))
    if None in at_depth or any(len(sites) > 1 for sites in at_depth.values()):
        return lambda record: str(record.get("site"))
    return lambda record: record["depth"]


def thin(steps: list[int], most: int = READINGS) -> list[int]:
    """Return at most `most` of the steps, evenly spaced, the first and the last included."""
    if len(steps) <= most:
        return steps
    return [steps[round(at * (len(steps) - 1) / (most - 1))] for at in range(most)]


def with_unit(name: str) -> str:
    """Return a statistic's name in words, with its unit if it is one of headwise's own."""
    words = name.replace("_", " ")
    return f"{words} ({UNITS[name]})" if name in UNITS else words


def span(values: list[float]) -> tuple[float, float]:
    """Return the range of the values, never empty."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def finite(value: Any) -> bool:
    """Return whether a value is a number that can be drawn."""
    return isinstance(value, int | float) and math.isfinite(value)


ALERTS, FEW = 100, 12  # largest number of alerts listed; largest number in a list that starts unfolded
LABELS = 150  # width of the arms' names in pixels

# one mark of a chart: its coordinates and value
Mark = dict[str, Any]


def health_sections(study: StudyFolder) -> list[Section]:
    """Return the section on health: alerts of every run, all arms by depth and by step, the heads of one run per arm.

    Empty if no run was watched.
    """
    readings = Readings(study)
    if not readings.watched:
        return []
    folds = [
        fold(f"{label}, seed {run.seed}", _maps(readings, study.baseline, label, run, records))
        for label, (run, records) in readings.first.items()
    ]
    intro = (
        "Statistics of every attention head while training; all arms share the colour scale of a statistic. By depth "
        "(last reading) and by step they are means over heads and watched seeds; folded below, head by head, the first "
        f"watched seed of each arm (all are in the health.jsonl of the runs). At most {READINGS} evenly spaced "
        f"readings are drawn, and of more than {len(DRAWN)} statistics those that alerts judge."
    )
    overview = _overview(readings, study) if len(readings.first) > 1 else ""
    return [Section("Health of the heads", join(_alerts(readings.alerts, readings.watched), overview, *folds), intro)]


def _alerts(alerts: list[tuple[RunFolder, Alert]], watched: int) -> Any:
    if not alerts:
        return prose([f"No alert was raised in {count(watched, 'watched run')}."])
    columns = [Column("arm"), Column("seed", number=True), Column("step", number=True), Column("alert")]
    columns.append(Column("what it says and what to do", wide=True))
    rows = [[run.arm, run.seed, alert["step"], alert["alert"], _words(alert)] for run, alert in alerts[:ALERTS]]
    raised = f"{count(len(alerts), 'alert')} in {count(watched, 'watched run')}"
    left_out = (
        f"; the first {ALERTS} are listed, all are in the health.jsonl of the runs" if len(alerts) > ALERTS else ""
    )
    return fold(raised + left_out, table(columns, rows, caption="Alerts"), opened=len(alerts) <= FEW)


def _words(alert: Alert) -> TableCell:
    parts = [words for words in (alert["sentence"], alert["remedy"]) if words]
    return TableCell("; ".join(parts) or None, small=alert["source"])


def _overview(readings: Readings, study: StudyFolder) -> Any:
    """Return, for each statistic, all arms by depth and by step, and both as differences from the baseline."""
    arms, rows = [label for label in study.arms if label in readings.first], []
    for name in readings.statistics():
        drawn_steps = set(thin(sorted({step for _, statistic, step in readings.by_step if statistic == name})))
        tables = {
            "layer": {(arm, at): v for (arm, statistic, at), v in readings.by_layer.items() if statistic == name},
            "step": {(arm, at): v for (arm, s, at), v in readings.by_step.items() if s == name and at in drawn_steps},
        }
        maps = []
        for x, means in tables.items():
            if x == "step" and len(drawn_steps) == 1:
                continue
            maps.append(_all_arms(means, x, arms, with_unit(name)))
            if study.baseline in readings.first:
                maps.append(_all_arms(means, x, arms, with_unit(name), study.baseline))
        rows.append(grid(maps, wide=True))
    return join(*rows)


def _all_arms(means: dict[tuple[str, Any], float], x: str, arms: list[str], words: str, baseline: str = "") -> Any:
    """Return a map of arms × layer or arms × step: the means, or with a `baseline` their differences from it."""
    if baseline:
        means = {
            (arm, at): value - means[baseline, at]
            for (arm, at), value in means.items()
            if arm != baseline and (baseline, at) in means
        }
    rows = [{"arm": arm, x: at, "value": float(f"{value:.4g}")} for (arm, at), value in means.items()]
    title = f"{words} by {'depth' if x == 'layer' else 'step'}" + (f", difference to {baseline}" if baseline else "")
    if not rows:
        return prose([f"{title}: no reading is shared with the baseline."], kind="note")
    style: dict[str, Any] = {"value_title": words, "legend_title": "", "label_limit": LABELS, "packed": x == "step"}
    if baseline:
        style |= around_zero(rows)
    return figure(heat_map(rows, x=x, y="arm", y_order=[a for a in arms if a != baseline], **style), title=title)


def _maps(readings: Readings, baseline: str, label: str, run: RunFolder, records: Records) -> Any:
    by_statistic: dict[str, Records] = {}
    for record in records:
        by_statistic.setdefault(record["statistic"], []).append(record)
    base = readings.first.get(baseline)
    # differences are drawn within a seed only
    paired = base[1] if base and label != baseline and base[0].seed == run.seed else []
    single_charts, rows = [_loss(run, readings.of_script)], []
    for name in (name for name in readings.statistics() if name in by_statistic):
        maps = _map(name, by_statistic[name], readings.domain(name), [r for r in paired if r["statistic"] == name])
        if len(maps) == 1:
            single_charts += maps
        else:
            rows.append(grid(maps, wide=True))
    return join(grid(single_charts, wide=True), *rows)


def _map(name: str, records: Records, domain: tuple[float, float], base: Records) -> list[Any]:
    """Return the maps of every head over steps, of its difference from the baseline, and of a chosen step.

    With a single reading, return one map of layer × head.
    """
    steps = thin(sorted({record["step"] for record in records}))
    rows = _rows(records, set(steps))
    title = with_unit(name)
    style: dict[str, Any] = {"value_title": title, "legend_title": "", "domain": domain}
    if len(steps) == 1:
        return [figure(heat_map(rows, **style), title=title, caption=f"Layer × head at step {steps[0]}.")]
    per_layer = all(row["head"] == "all" for row in rows)
    maps = [_over_steps(rows, title, "Layer over steps." if per_layer else "Every head over steps.", style, per_layer)]
    baseline_values = {(row["layer"], row["head"], row["step"]): row["value"] for row in _rows(base, set(steps))}
    changes = [
        row | {"value": float(f"{row['value'] - baseline_values[key]:.4g}")}
        for row in rows
        if (key := (row["layer"], row["head"], row["step"])) in baseline_values
    ]
    if changes:
        words = "Difference to the baseline, same seed."
        maps.append(_over_steps(changes, title, words, style | around_zero(changes), per_layer))
    if not per_layer:
        chosen = heat_map(rows, reading="step", packed=True, **style)
        maps.append(figure(chosen, title=title, caption="Layer × head at the chosen step."))
    return maps


def _over_steps(rows: list[Mark], title: str, caption: str, style: dict[str, Any], per_layer: bool) -> Any:
    if per_layer:
        chart = heat_map(rows, x="step", y="layer", packed=True, **style)
    else:
        named = [
            {"layer · head": f"{row['layer']} · {row['head']}", "step": row["step"], "value": row["value"]}
            for row in rows
        ]
        chart = heat_map(named, x="step", y="layer · head", packed=True, **style)
    return figure(chart, title=title, caption=caption)


def _rows(records: Records, steps: set[int]) -> list[Mark]:
    name_of = layer_names(records)
    return [
        {"layer": name_of(r), "head": _head(r), "step": r["step"], "value": float(f"{r['value']:.4g}")}
        for r in records
        if r["step"] in steps
    ]


def _loss(run: RunFolder, of_script: bool) -> Any:
    rows = [
        {"step": line.step, "loss": line.metrics[name], "split": name.removesuffix("/loss")}
        for line in run.epochs
        for name in line.metrics
        if name.endswith("/loss") and finite(line.metrics[name]) and line.step is not None
    ]
    if not rows:
        return prose(["This run recorded no loss."])
    return figure(
        lines(rows, x="step", y="loss", series="split"),
        title="loss (nats)",
        caption="Every step that the script logged." if of_script else "At the end of every epoch, over steps.",
    )


def _head(record: Record) -> Any:
    if record.get("group") is not None:
        return f"group {record['group']}"
    return record["head"] if record.get("head") is not None else "all"
