"""Show what a report rests on: every run with its source file, and how to repeat the study."""

from __future__ import annotations

import shlex

from headwise.pages.formats import label_of, milliseconds, unit_of
from headwise.pages.shell import Cell, Column, join, pairs, preformatted, prose, table

REPEAT = "The command below, started again, repeats what is damaged."


def damaged_words(analysis: dict) -> list[str]:
    """Return one line for each damaged run: which it is and what became of its files."""
    return [
        f"{run['method']}, seed {run['seed']}, is damaged and left out: in runs/{run['run']}, {', '.join(run['files'])}"
        for run in analysis.get("damaged", [])
    ]


def damaged(analysis: dict):
    """Name the runs whose files are no longer what they wrote: their figures are left out."""
    if not analysis["damaged"]:
        return ""
    return prose([f"{words}." for words in damaged_words(analysis)] + [REPEAT], kind="warning")


def words_on_runs(study) -> str:
    """Return where the files of the runs are."""
    return (
        "One row a run; its source is the result.json of the folder of that name. "
        f"The folder {study.path.name}/runs/ holds its configuration, its epochs (metrics.jsonl) and its result."
    )


def runs_table(study, analysis: dict):
    """Return one row a run, with the file that its figures come from."""
    names = list(analysis["higher_is_better"])
    units = {name: unit_of(name, analysis["metric"]) for name in names}
    figures = [Column(label_of(name, analysis["metric"]), units[name].name, number=True) for name in names]
    columns = [
        Column("method"),
        Column("seed", number=True),
        Column("source"),
        Column("state"),
        *figures,
        Column("time per step", number=True),
    ]
    rows = []
    for method in study.methods:
        for seed in study.seeds:
            run = study.runs.get((method, seed))
            values = [run.metric(name) if run else None for name in names]
            time = run.metric("seconds_per_step") if run else None
            diverged = run is not None and run.status == "diverged"
            cells = [figure_cell(units[name].number(value), value, diverged) for name, value in zip(names, values)]
            spent = figure_cell(milliseconds(time), time, diverged)
            rows.append([method, seed, _source(run), _run_state(run), *cells, spent])
    return table(columns, rows)


def figure_cell(text: str | None, value: float | None, diverged: bool, small: str = "") -> Cell:
    """Return the cell of a figure; where there is none, because every run diverged, it says so."""
    return Cell("diverged", tone="diverged") if text is None and diverged else Cell(text, value, small=small)


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
    return Cell(run.path.name, href=f"runs/{run.path.name}/{name}")


def repeat(described: dict, environments=()):
    """Return the exact command, and the commit, the versions and the hardware that the results name, or else the description."""
    command = described.get("command") or ""
    command = shlex.join(map(str, command)) if isinstance(command, (list, tuple)) else str(command)
    found = environments or [described]
    parts = [preformatted(command) if command else prose(["The command was not recorded."])]
    if len(found) > 1:
        parts.append(prose([f"{differing(environments)}."], kind="warning"))
    for environment in found:
        runs = {"runs": environment["runs"]} if len(found) > 1 else {}
        parts.append(pairs(runs | _origin(environment)))
    notes = described.get("notes") or []
    return join(*parts, prose([f"Note. {note}" for note in notes]))


def differing(environments) -> str:
    """Say in how many environments the results were made, and in what these differ."""
    origins = [_origin(environment) for environment in environments]
    names = [name for name in dict.fromkeys(key for origin in origins for key in origin) if not _same(origins, name)]
    return f"The results come from {len(origins)} environments, which differ in {', '.join(names)}"


def _same(origins: list[dict], name: str) -> bool:
    return all(origin.get(name) == origins[0].get(name) for origin in origins)


def _origin(described: dict) -> dict:
    items = {"commit": described.get("commit") or "unknown"}
    for name in ("versions", "hardware"):
        value = described.get(name) or {}
        items |= (
            {f"{name.rstrip('s')}: {key}": item for key, item in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    return items
