"""Lay out the report of a comparison: the answer, its table, the differences, the curves, the runs and how to repeat it."""

from __future__ import annotations

import re

from headwise.comparing.report.health_section import health_sections
from headwise.comparing.report.learning_curves import learning_curves
from headwise.comparing.report.run_records import (
    damaged,
    differing,
    figure_cell,
    repeat,
    runs_table,
    words_on_runs,
)
from headwise.pages.charts import forest
from headwise.pages.formats import MINUS, label_of, mebibytes, milliseconds, p_value, unit_of
from headwise.pages.shell import Cell, Column, Section, figure, fold, join, page, pairs, prose, table

SIGNS = {"better": "▲ ", "worse": "▼ ", "higher": "↑ ", "lower": "↓ "}


def study_page(study, analysis: dict) -> str:
    """Return the report of a study as one HTML page; `study` is a StudyFolder, `analysis` what `analyse_study` made of it."""
    described = study.study
    sections = [
        Section(
            "Result",
            join(
                _unfinished(analysis),
                damaged(analysis),
                _mixtures(study, analysis),
                _answer_table(analysis),
                _notes_on_table(analysis),
            ),
        ),
        *_differences(analysis),
        *learning_curves(study, analysis),
        *_other_outcomes(analysis),
        *health_sections(study),
        Section("Runs", runs_table(study, analysis), words_on_runs(study), collapsed=True),
        Section("Settings", pairs(described.get("settings", {})), collapsed=True),
        Section("How to repeat it", repeat(described, analysis["environments"])),
    ]
    facts = [
        (
            "metric",
            f"{analysis['metric']['label']} ({'higher' if analysis['metric']['higher_is_better'] else 'lower'} is better)",
        ),
        ("methods", f"{len(study.methods) - 1} and the baseline"),
        ("seeds", len(study.seeds)),
        (
            "runs",
            f"{len(study.methods) * len(study.seeds) - len(analysis['missing'])} of {len(study.methods) * len(study.seeds)}",
        ),
        *_extra_facts(described.get("settings", {})),
    ]
    return page(
        described.get("title") or described.get("name", "Comparison"),
        sections,
        eyebrow="headwise · comparison",
        question=described.get("question", ""),
        lead=analysis["answer"],
        facts=facts,
    )


def _extra_facts(settings: dict):
    wanted = ("dataset", "train_size", "test_size", "epochs", "batch_size")
    return [
        (name.replace("_", " "), settings[name]) for name in wanted if isinstance(settings.get(name), (str, int, float))
    ]


def _unfinished(analysis: dict):
    if analysis["complete"]:
        return ""
    by_method: dict[str, list] = {}
    for cell in analysis["missing"]:
        by_method.setdefault(cell["method"], []).append(cell["seed"])
    words = "; ".join(f"{method}: {_seeds(seeds)}" for method, seeds in by_method.items())
    return prose(
        [f"This study is not finished; the figures will change. Runs without a result: {words}."], kind="warning"
    )


def _mixtures(study, analysis: dict):
    """Say what was not the same for all runs, though none of it enters their identity."""
    watched = [run.watched for run in study.runs.values() if run.result]
    words = []
    if len(set(watched)) > 1:
        words.append(
            f"{watched.count(False)} of {len(watched)} runs were not watched; time and memory leave the readings out."
        )
    if len(analysis["environments"]) > 1:
        words.append(
            f"{differing(analysis['environments'])}: see How to repeat it. Times are not comparable between them."
        )
    return prose(words, kind="warning") if words else ""


def _seeds(seeds: list) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def gap_name(analysis: dict) -> str | None:
    """Return the generalisation gap that belongs to the main metric, or None when the runs do not record it."""
    name = "gap_" + analysis["metric"]["name"].partition("_")[2]
    return name if name in analysis["higher_is_better"] else None


def _answer_table(analysis: dict):
    metric, gap = analysis["metric"], gap_name(analysis)
    unit = unit_of(metric["name"], metric)
    columns = [
        Column("method"),
        Column(metric["label"], f"{unit.name} [95\u00a0%]", number=True),
        Column("difference", f"paired, {unit.difference} [95\u00a0%]", number=True),
        Column("corrected p", number=True),
        Column("verdict"),
        Column("gap", f"train {MINUS} test, {unit_of(gap, metric).difference}" if gap else "", number=True),
        Column("time per step", "median", number=True),
        Column("memory", "peak, median", number=True),
        Column("runs"),
    ]
    rows = [_row(method, analysis, unit, gap) for method in analysis["methods"]]
    marked = [at for at, method in enumerate(analysis["methods"]) if method["label"] == analysis["baseline"]]
    return table(columns, rows, marked=marked, caption="Every method against the baseline")


def _row(method: dict, analysis: dict, unit, gap: str | None) -> list:
    metric = analysis["metric"]
    mean, costs = method["metrics"][metric["name"]], method["costs"]
    gaps = method["metrics"][gap] if gap else {"mean": None}
    time, memory, diverged = costs["seconds_per_step"], costs["peak_memory_bytes"], all_diverged(method)
    return [
        Cell(method["label"]),
        figure_cell(unit.number(mean["mean"]), mean["mean"], diverged, unit.interval(mean["low"], mean["high"])),
        *difference_cells(method["differences"].get(metric["name"]), unit, diverged),
        figure_cell(unit_of(gap, metric).number(gaps["mean"], signed=True) if gap else None, gaps["mean"], diverged),
        figure_cell(milliseconds(time), time, diverged),
        figure_cell(mebibytes(memory), memory, diverged),
        _state(method["runs"]),
    ]


def all_diverged(method: dict) -> bool:
    """Tell whether a method has no figures because all of its runs that ended have diverged."""
    return bool(method["runs"]["diverged"]) and not method["runs"]["finished"]


def difference_cells(entry: dict | None, unit, diverged: bool = False) -> list[Cell]:
    """Return the cells of a paired difference: the difference, its corrected p and the verdict (dashes for the baseline)."""
    if entry is None:
        return [Cell("–"), Cell("–"), Cell("–", value=None)]
    tone = entry["verdict"] if entry["verdict"] in ("better", "worse") else "plain"
    text, detail = re.fullmatch(r"(.+?)((?: with | \().*)?", entry["verdict_text"]).groups(default="")
    interval = unit.interval(entry["low"], entry["high"], signed=True)
    return [
        figure_cell(unit.number(entry["mean"], signed=True), entry["mean"], diverged, interval),
        figure_cell(p_value(entry["p_corrected"]), entry["p_corrected"], diverged),
        Cell(SIGNS.get(entry["verdict"], "") + text, tone=tone, small=detail),
    ]


def _state(runs: dict) -> Cell:
    text = f"{runs['finished']} of {runs['asked']}"
    steps = [
        f"seed {run['seed']} diverged at step {run['step'] if run['step'] is not None else '?'}"
        for run in runs["diverged"]
    ]
    missing = [f"{len(runs['missing'])} missing"] if runs["missing"] else []
    return Cell(text, small="; ".join(steps + missing))


def _notes_on_table(analysis: dict):
    words = analysis["statistics"]
    return prose(
        [
            f"Differences: {words['difference']}. Intervals: {words['interval']}. p: {words['p']}; correction: {words['correction']}. "
            f"Verdict: {words['verdict']}. Each figure comes from the result.json of the runs listed under Runs; the same table stands "
            "in table.csv and table.md, the whole analysis in analysis.json."
        ],
        kind="note",
    )


def _differences(analysis: dict) -> list[Section]:
    metric = analysis["metric"]
    unit = unit_of(metric["name"], metric)
    found = [
        (m["label"], m["differences"][metric["name"]])
        for m in analysis["methods"]
        if metric["name"] in m["differences"]
    ]
    rows = [_forest_row(label, entry, unit) for label, entry in found if entry["mean"] is not None]
    if not rows:
        return []
    direction = "right" if metric["higher_is_better"] else "left"
    intro = (
        f"Paired difference to the baseline in {metric['label']} with its 95 % interval; further {direction} is better. "
        "A triangle marks a verdict, a circle no evidence, a diamond too few seeds."
    )
    left_out = [label for label, entry in found if entry["mean"] is None]
    caption = f"Not drawn, because no pair of runs finished: {', '.join(left_out)}." if left_out else ""
    title = f"difference in {metric['label']} ({unit.difference})"
    return [Section("Paired differences", figure(forest(rows, title=title), caption=caption), intro)]


def _forest_row(label: str, entry: dict, unit) -> dict:
    scaled = {key: None if entry[key] is None else entry[key] * unit.factor for key in ("mean", "low", "high")}
    number = f"{unit.number(entry['mean'], signed=True)} {unit.interval(entry['low'], entry['high'], signed=True)}"
    words = f"{number}, corrected p {p_value(entry['p_corrected'])}, {entry['n']} pairs: {entry['verdict_text']}"
    return {"label": label, "verdict": entry["verdict"], "words": words, **scaled}


def _other_outcomes(analysis: dict) -> list[Section]:
    metric = analysis["metric"]
    names = [name for name in analysis["higher_is_better"] if name != metric["name"]]
    if not names or len(analysis["methods"]) < 2:
        return []
    folds = [fold(label_of(name, metric), _outcome_table(analysis, name), opened=name == "test_loss") for name in names]
    intro = "The other figures, by the same statistics. Each is corrected for the number of methods, not for the number of figures."
    return [Section("Other outcomes", join(*folds), intro)]


def _outcome_table(analysis: dict, name: str):
    metric = analysis["metric"]
    unit = unit_of(name, metric)
    columns = [
        Column("method"),
        Column(label_of(name, metric), f"{unit.name} [95\u00a0%]", number=True),
        Column("difference", f"paired, {unit.difference} [95\u00a0%]", number=True),
        Column("corrected p", number=True),
        Column("verdict"),
    ]
    rows = []
    for method in analysis["methods"]:
        mean = method["metrics"][name]
        diverged = all_diverged(method)
        interval = unit.interval(mean["low"], mean["high"])
        shown = figure_cell(unit.number(mean["mean"]), mean["mean"], diverged, interval)
        rows.append([Cell(method["label"]), shown, *difference_cells(method["differences"].get(name), unit, diverged)])
    marked = [at for at, method in enumerate(analysis["methods"]) if method["label"] == analysis["baseline"]]
    return table(columns, rows, marked=marked)
