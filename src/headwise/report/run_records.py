"""Show what a report rests on: every run with its source file, and how to repeat the study."""

from __future__ import annotations

import shlex

from headwise.report.formats import label_of, milliseconds, unit_of
from headwise.report.shell import Cell, Column, join, pairs, preformatted, prose, table


def words_on_runs(study) -> str:
    """Return where the files of the runs are."""
    return f"One row a run. The folder {study.path.name}/runs/ holds its configuration, its epochs (metrics.jsonl) and its result."


def runs_table(study, analysis: dict):
    """Return one row a run, with the file that its figures come from."""
    names = list(analysis["higher_is_better"])
    units = {name: unit_of(name, analysis["metric"]) for name in names}
    figures = [Column(label_of(name, analysis["metric"]), units[name].name, number=True) for name in names]
    columns = [
        Column("method"),
        Column("seed", number=True),
        Column("state"),
        *figures,
        Column("time per step", number=True),
        Column("source"),
    ]
    rows = []
    for method in study.methods:
        for seed in study.seeds:
            run = study.runs.get((method, seed))
            values = [run.metric(name) if run else None for name in names]
            time = run.metric("seconds_per_step") if run else None
            cells = [Cell(units[name].number(value), value) for name, value in zip(names, values)]
            rows.append([method, seed, _run_state(run), *cells, Cell(milliseconds(time), time), _source(run)])
    return table(columns, rows)


def _run_state(run) -> Cell:
    if run is None:
        return Cell("not started", tone="plain")
    if run.status == "diverged":
        step = run.result.get("diverged_at_step")
        return Cell(f"diverged at step {step if step is not None else '?'}", tone="diverged")
    return Cell(run.status)


def _source(run) -> Cell:
    if run is None:
        return Cell(None)
    name = "result.json" if run.result else "metrics.jsonl"
    path = f"runs/{run.path.name}/{name}"
    return Cell(path, href=path)


def repeat(described: dict):
    """Return the exact command, the commit, the versions and the hardware of a study or of findings."""
    command = described.get("command") or ""
    command = shlex.join(map(str, command)) if isinstance(command, (list, tuple)) else str(command)
    items = {"commit": described.get("commit") or "unknown"}
    for name in ("versions", "hardware"):
        value = described.get(name) or {}
        items |= (
            {f"{name.rstrip('s')}: {key}": item for key, item in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    parts = [preformatted(command) if command else prose(["The command was not recorded."]), pairs(items)]
    notes = described.get("notes") or []
    return join(*parts, prose([f"Note. {note}" for note in notes]))
