"""The page of a comparison's report: the first screen (answer, facts, plot), claims, outcomes, costs, and every run."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headwise_verdict.pages.formats import Unit, milliseconds, unit_named
from headwise_verdict.pages.line_charts import curves
from headwise_verdict.pages.shell import (
    Column,
    Section,
    TableCell,
    figure,
    fold,
    grid,
    join,
    legend,
    page,
    pairs,
    preformatted,
    prose,
    table,
)
from headwise_verdict.reporting.answer_table import answer_table, figure_cell, notes_on_table
from headwise_verdict.reporting.difference_section import axis_sections, forest_section, panels_section
from headwise_verdict.reporting.headline import headline, next_step
from headwise_verdict.reporting.health_section import health_sections
from headwise_verdict.reporting.optional_sections import (
    claims_section,
    cost_section,
    divergence_section,
    heads_section,
    maps_section,
    phases_section,
)
from headwise_verdict.reporting.outcome_texts import brief_names, label_of, qualities, unit_of
from headwise_verdict.results.analysis_record import Analysis, FindingsRecord, stranger_words
from headwise_verdict.results.folder import RunFolder, StudyFolder
from headwise_verdict.results.intervals import interval
from headwise_verdict.results.records import EnvironmentRecord, EpochLine, StudyRecord

# between the phases of a training in their text, and how many of them are listed
THEN, MOST_PHASES = ", then ", 4


def study_page(study: StudyFolder, analysis: Analysis) -> str:
    """Return the report of a study as one HTML page."""
    described = study.study
    warnings = join(_unfinished(analysis), _doubts(study, analysis))
    sections = [
        *forest_section(analysis),
        Section("Result", _answered(study, analysis)),
        *claims_section(analysis.claims, analysis.premises),
        *divergence_section(analysis),
        *panels_section(analysis),
        *axis_sections(study, analysis),
        *phases_section(described, analysis),
        *cost_section(analysis),
    ]
    appendix = [
        *learning_curves(study, analysis),
        *heads_section(analysis),
        *maps_section(study),
        *health_sections(study),
        Section("Runs", runs_table(study, analysis), words_on_runs(study), collapsed=True),
        Section("Settings", pairs(described.settings), collapsed=True),
        Section("How to repeat it", repeat(described, analysis.environments)),
    ]
    sections += [replace(one, appendix=True) for one in appendix]
    return page(
        described.title or described.name or "Comparison",
        sections,
        eyebrow="headwise · comparison",
        question=described.question,
        lead=headline(analysis),
        below=warnings,
        facts=_facts(study, analysis),
    )


def _answered(study: StudyFolder, analysis: Analysis) -> Any:
    """Return the main table, the next step, and a closed fold with the answer in words and the statistical methods."""
    step = next_step(analysis)
    # the short names of arms that appear where space is limited
    names = [(brief, label) for label, brief in brief_names(analysis).items() if brief != label]
    details = join(prose([analysis.answer]), notes_on_table(analysis), pairs(names) if names else "")
    table = answer_table(analysis, chosen_by_trials(study.study.notes))
    return join(table, prose([step]) if step else "", fold("How this was judged", details))


def _facts(study: StudyFolder, analysis: Analysis) -> list[tuple[str, Any]]:
    metric, cells = analysis.metric, len(study.arms) * len(study.seeds)
    direction = {True: " (higher is better)", False: " (lower is better)", None: ""}[metric.higher_is_better]
    facts = [
        ("outcome", f"{metric.label}{direction}"),
        ("arms", f"{len(study.arms) - 1} and {study.baseline}"),
        ("seeds", len(study.seeds)),
        ("runs", f"{cells - len(analysis.missing)} of {cells}"),
    ]
    if analysis.margin is not None:
        unit = unit_named(metric.unit)
        facts.append(("margin of equivalence", f"±{unit.number(analysis.margin)} {unit.difference}".strip()))
    names = ("dataset", "train_size", "test_size", "phases", "epochs", "steps", "batch_size")
    settings = study.study.settings
    settings_shown = [
        (name.replace("_", " "), _brief(settings[name]))
        for name in names
        if isinstance(settings.get(name), str | int | float)
    ]
    return facts + settings_shown


def _brief(value: str | int | float) -> str | int | float:
    """Return the value of a setting; of many phases, their number, the first and the last."""
    parts = value.split(THEN) if isinstance(value, str) else []
    return f"{len(parts)}: {parts[0]}{THEN}…{THEN}{parts[-1]}" if len(parts) > MOST_PHASES else value


def _unfinished(analysis: Analysis) -> Any:
    if analysis.complete:
        return ""
    by_arm: dict[str, list[int]] = {}
    for cell in analysis.missing:
        by_arm.setdefault(cell.arm, []).append(cell.seed)
    words = "; ".join(f"{arm}: {_seeds(seeds)}" for arm, seeds in by_arm.items())
    return prose(
        [f"This study is not finished; the figures will change. Runs without a result: {words}."], kind="warning"
    )


def _doubts(study: StudyFolder, analysis: Analysis) -> Any:
    """Return the warnings on damaged runs, on the pairing, and on differences between runs outside their settings."""
    watched = [run.watched for run in study.runs.values() if run.result]
    words = [f"{run.words}." for run in analysis.damaged]
    words += ["The command below, started again, repeats what is damaged."] if words else []
    words += [f"{stranger_words(name)}." for name in analysis.strangers]
    words += analysis.warnings
    if len(set(watched)) > 1:
        words.append(
            f"{watched.count(False)} of {len(watched)} runs were not watched; time and memory leave the readings out."
        )
    if len(analysis.environments) > 1:
        words.append(
            f"{differing(analysis.environments)}: see How to repeat it. Times are not comparable between them."
        )
    return prose(words, kind="warning") if words else ""


def _seeds(seeds: list[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


NOTE = re.compile(
    r"(?P<text>.+): (?P<all>all of )?(?P<trials>\d+) trials? on validation (?:chose|diverged; it stays) (?P<label>.+) "
    r"with learning rate (?P<rate>[^ ]+)\."
)


def chosen_by_trials(notes: Sequence[str]) -> dict[str, str]:
    """Return what the trials of every tuned arm chose, by label; empty for a study without tuning."""
    choices = {}
    for note in notes:
        if match := NOTE.fullmatch(note):
            trials = f"{match['trials']} trials" if int(match["trials"]) != 1 else "1 trial"
            start = f"all of {trials} diverged" if match["all"] else f"chosen by {trials}"
            origin = f", from {match['text']}" if match["text"] != match["label"] else ""
            choices[match["label"]] = f"{start}{origin}; learning rate {match['rate']}"
    return choices


def words_on_runs(study: StudyFolder) -> str:
    """Return where the files of the runs are."""
    return (
        "One row a run; its source is the result.json of the folder of that name. "
        f"The folder {study.path.name}/runs/ holds its configuration, its {_moment(study)}s (metrics.jsonl) and its "
        "result."
    )


def runs_table(study: StudyFolder, analysis: Analysis) -> Any:
    """Return a table of one row per run, with a link to the file of its figures."""
    outcomes = qualities(analysis)
    figures = [Column(label_of(one), unit_of(one).name, number=True) for one in outcomes]
    columns = [Column("arm"), Column("seed", number=True), Column("source"), Column("state"), *figures]
    is_timed = any(run.metric("cost/seconds_per_step") is not None for run in study.runs.values())
    columns += [Column("time per step", number=True)] if is_timed else []
    rows = []
    for arm in study.arms:
        for seed in study.seeds:
            run = study.runs.get((arm, seed))
            diverged = run is not None and run.status == "diverged"
            cells = []
            for one in outcomes:
                value = run.metric(one.name) if run else None
                cells.append(figure_cell(unit_of(one).number(value), value, diverged))
            time = run.metric("cost/seconds_per_step") if run else None
            spent = [figure_cell(milliseconds(time), time, diverged)] if is_timed else []
            rows.append([arm, TableCell(str(seed), seed), _source(run), _run_state(run), *cells, *spent])
    return table(columns, rows, caption="Every run")


def _run_state(run: RunFolder | None) -> TableCell:
    if run is None:
        return TableCell("not started", tone="plain")
    if run.result is not None and run.status == "diverged":
        divergence = run.result.divergence
        return TableCell(
            f"diverged at step {divergence.step if divergence else '?'}",
            tone="diverged",
            small=divergence.why if divergence else "",
        )
    return TableCell(run.status)


def _source(run: RunFolder | None) -> TableCell:
    if run is None:
        return TableCell(None)
    name = "result.json" if run.result else "metrics.jsonl"
    return TableCell(run.path.name, href=f"runs/{run.path.name}/{name}")


def repeat(described: StudyRecord | FindingsRecord, environments: Sequence[EnvironmentRecord] = ()) -> Any:
    """Return the exact command and the commit, versions and hardware of the results, else those of the description."""
    command = described.command
    text = command if isinstance(command, str) else shlex.join(command)
    own = EnvironmentRecord(commit=described.commit, versions=described.versions, hardware=described.hardware)
    origins = list(environments) or [own]
    parts = [preformatted(text) if text else prose(["The command was not recorded."])]
    if len(origins) > 1:
        parts.append(prose([f"{differing(origins)}."], kind="warning"))
    for environment in origins:
        runs = {"runs": environment.runs} if len(origins) > 1 else {}
        parts.append(pairs(runs | _origin(environment)))
    return join(*parts, prose([f"Note. {note}" for note in described.notes]))


def differing(environments: Sequence[EnvironmentRecord]) -> str:
    """Return the sentence on the number of environments of the results and on their differences."""
    origins = [_origin(environment) for environment in environments]
    names = [name for name in dict.fromkeys(key for origin in origins for key in origin) if not _same(origins, name)]
    return f"The results come from {len(origins)} environments, which differ in {', '.join(names)}"


def _same(origins: list[dict[str, Any]], name: str) -> bool:
    return all(origin.get(name) == origins[0].get(name) for origin in origins)


def _origin(environment: EnvironmentRecord) -> dict[str, Any]:
    items: dict[str, Any] = {"commit": environment.commit or "unknown"}
    items |= {f"version: {name}": version for name, version in (environment.versions or {}).items()}
    return items | {f"hardware: {name}": value for name, value in (environment.hardware or {}).items()}


BAND = "95 % interval (Student's t) of the mean over the finished seeds"
# number of arms whose curves are in open folds
OPEN = 9

Runs = list[RunFolder]


def learning_curves(study: StudyFolder, analysis: Analysis) -> list[Section]:
    """Return the section of learning curves: one row per arm, with the loss and the primary metric.

    Empty if no run recorded an epoch.
    """
    stored = {label: study.of(label) for label in study.arms}
    held_out, moment = _held_out(study, stored), _moment(study)
    kinds = dict.fromkeys(["loss", study.study.parts(analysis.primary)[1]])
    quantities = [kind for kind in kinds if _records(stored, f"train/{kind}") or _records(stored, f"{held_out}/{kind}")]
    if not quantities:
        return []
    outcomes = {kind: study.study.outcome(f"test/{kind}") for kind in quantities}
    units = {kind: unit_of(analysis.outcomes.get(one.name, one)) for kind, one in outcomes.items()}
    series = {
        (label, kind): _series(stored[label], kind, held_out, units[kind].factor, moment == "step")
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
    drawn = {row["split"] for rows in series.values() for row in rows}
    # only diverged runs are drawn if no run finished
    splits = [split for split in (held_out, "train") if split in drawn] or ["train"]
    roles = [("arm", "--blue")] * (len(study.arms) > 1) + [("baseline", "--grey")]
    entries = [(f"{who}, {split}", colour, split == "train") for who, colour in roles for split in splits]
    intro = (
        f"Mean over seeds of every {moment}; band: {BAND}. All arms share the axes. Diverged runs are drawn "
        "singly and end in a cross."
    )
    return [Section("Learning curves", join(legend(entries), *folds), intro)]


def _moment(study: StudyFolder) -> str:
    """Return what a curve's points count: steps, of a script or of a recipe set in steps; else epochs, or points."""
    by_step = study.study.by_step or bool(study.study.settings.get("steps"))
    logged = all(line.step is not None for run in study.runs.values() for line in run.epochs)
    return "step" if by_step and logged else "point" if study.study.by_step else "epoch"


def _chart(study: StudyFolder, runs: Runs, series: dict, label: str, kind: str, unit: Unit, domain: Any) -> Any:
    words = kind.replace("_", " ")
    title = f"{words} ({unit.name})" if unit.name else words
    rows = [row | {"role": "baseline"} for row in series[study.baseline, kind]]
    if label != study.baseline:
        rows += [row | {"role": "arm"} for row in series[label, kind]]
    broken = [
        point
        for run in runs
        if run.status == "diverged"
        for point in _points(run, kind, unit.factor, _moment(study) == "step")
    ]
    if not rows and not broken:
        ended = "ended" if _moment(study) == "epoch" else "was logged"
        return prose([f"{title}: no {_moment(study)} of a run {ended} with a finite figure."], kind="note")
    return figure(
        curves(rows, x=_moment(study), y=title, domain=domain, broken=broken),
        name=f"Learning curve of {label}, {words}",
    )


def _held_out(study: StudyFolder, stored: dict[str, Runs]) -> str:
    main, kind = study.study.parts(study.study.primary)
    return main if _records(stored, f"{main}/loss") or _records(stored, f"{main}/{kind}") else "validation"


def _records(stored: dict[str, Runs], name: str) -> bool:
    return any(_finite(line.metrics.get(name)) for runs in stored.values() for run in runs for line in run.epochs)


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _place(line: EpochLine, by_step: bool) -> int:
    return line.step if by_step and line.step is not None else line.epoch


def _series(runs: Runs, kind: str, held_out: str, factor: float, by_step: bool) -> list[dict[str, Any]]:
    rows = []
    for split in (held_out, "train"):
        by_moment: dict[int, list[float]] = {}
        for run in runs:
            for line in run.epochs if run.status == "finished" else ():
                value = line.metrics.get(f"{split}/{kind}")
                if value is not None and math.isfinite(value):
                    by_moment.setdefault(_place(line, by_step), []).append(value * factor)
        for moment, values in sorted(by_moment.items()):
            mean = interval(values, bootstrap_from=math.inf)
            row = {"x": moment, "split": split, "dashed": split == "train"}
            rows.append(row | {"mean": mean.mean, "low": mean.low, "high": mean.high})
    return rows


def _points(run: RunFolder, kind: str, factor: float, by_step: bool) -> list[dict[str, Any]]:
    points = [
        (_place(line, by_step), value) for line in run.epochs if _finite(value := line.metrics.get(f"train/{kind}"))
    ]
    divergence = run.result.divergence if run.result else None
    title = f"seed {run.seed}, diverged at step {divergence.step if divergence else '?'}"
    return [
        {"x": moment, "value": value * factor, "run": title, "last": at == len(points) - 1}
        for at, (moment, value) in enumerate(points)
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
