"""The sources of a report: every run with its result file, and how to repeat the study."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from headwise.pages.formats import milliseconds
from headwise.pages.shell import Cell, Column, join, pairs, preformatted, prose, table
from headwise.reporting.answer_table import figure_cell
from headwise.reporting.outcome_texts import label_of, qualities, unit_of
from headwise.results.analysis_record import Analysis, FindingsRecord
from headwise.results.folder import RunFolder, StudyFolder
from headwise.results.records import EnvironmentRecord, StudyRecord


def words_on_runs(study: StudyFolder) -> str:
    """Return where the files of the runs are."""
    return (
        "One row a run; its source is the result.json of the folder of that name. "
        f"The folder {study.path.name}/runs/ holds its configuration, its epochs (metrics.jsonl) and its result."
    )


def runs_table(study: StudyFolder, analysis: Analysis) -> Any:
    """Return a table of one row per run, with a link to the file of its figures."""
    outcomes = qualities(analysis)
    figures = [Column(label_of(one), unit_of(one).name, number=True) for one in outcomes]
    columns = [Column("arm"), Column("seed", number=True), Column("source"), Column("state"), *figures]
    columns.append(Column("time per step", number=True))
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
            spent = figure_cell(milliseconds(time), time, diverged)
            rows.append([arm, Cell(str(seed), seed), _source(run), _run_state(run), *cells, spent])
    return table(columns, rows, caption="Every run")


def _run_state(run: RunFolder | None) -> Cell:
    if run is None:
        return Cell("not started", tone="plain")
    if run.result is not None and run.status == "diverged":
        divergence = run.result.divergence
        return Cell(
            f"diverged at step {divergence.step if divergence else '?'}",
            tone="diverged",
            small=divergence.why if divergence else "",
        )
    return Cell(run.status)


def _source(run: RunFolder | None) -> Cell:
    if run is None:
        return Cell(None)
    name = "result.json" if run.result else "metrics.jsonl"
    return Cell(run.path.name, href=f"runs/{run.path.name}/{name}")


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
