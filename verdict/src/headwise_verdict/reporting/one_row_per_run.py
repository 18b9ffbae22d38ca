"""Tables that have a row per step, or hold arm and seed in the runs' names alone, as tables of one row per run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headwise_verdict.reporting.cell_values import figure_of
from headwise_verdict.reporting.table_columns import ARMS, FIGURES, RUNS, SEEDS, STEPS, plain
from headwise_verdict.reporting.table_rows import Row, names_of

# what tools call the evaluations whose losses tell whether a training was long enough
EVALUATIONS = {"train": "train", "training": "train", "test": "test"}
EVALUATIONS |= dict.fromkeys(("eval", "val", "valid", "validation"), "validation")
LOSS = re.compile(rf"(?:({'|'.join(EVALUATIONS)})[/_.])?loss")
# columns of run names, and the names that contain arm and seed: plain-3, plain_seed3, "DropHead(p=0.1), seed 3"
RUN_NAMES = ("run_name", "run", "name", "mlflow.runname")
NAMED = re.compile(
    r"(.*?[^\s,_/|:=-])(?:[\s,_/|:=-]+(?:seed|s)?|seed)[\s,_/|:=-]*(\d{1,4000})", re.IGNORECASE | re.ASCII | re.DOTALL
)


def named_by_run(rows: list[Row], columns_named: bool) -> tuple[list[Row], list[str]]:
    """Return the rows with arm and seed taken from the runs' names if no column contains them, and a note on it.

    The CSV of a plot of trackio's dashboard is such a table. `columns_named`: whether the user named a column.
    """
    by_plain_name = {plain(name): name for name in reversed(names_of(rows))}
    column = next((by_plain_name[name] for name in RUN_NAMES if name in by_plain_name), None)
    if columns_named or column is None or by_plain_name.keys() & {*ARMS, *SEEDS}:
        return rows, []
    matches = [NAMED.fullmatch(str(row.values.get(column, "")).strip()) for row in rows]
    complete = [part for part in matches if part is not None]
    if len(complete) < len(rows):
        return rows, []
    arm, seed = complete[0].groups()
    note = f"arms and seeds are taken from the names in {column}: {complete[0].group()} is {arm}, seed {int(seed)}."
    return [
        Row(row.line, row.values | {"arm": part.group(1), "seed": int(part.group(2))})
        for row, part in zip(rows, complete)
    ], [note]


def last_of_each_run(rows: list[Row], columns: Sequence[str]) -> list[Row]:
    """Return the last row of each run, with the losses of all, if a table has a row per step, as trackio's tables do.

    `columns` are those of arm and seed that the user named.
    """
    names = {name.lower(): name for name in names_of(rows)}
    step, run = (next((names[name] for name in names_tried if name in names), None) for names_tried in (STEPS, RUNS))
    if step is None or run is None:
        return rows
    # a run name that two arms or seeds share, such as a number within each, denotes two runs
    parts = [name for name in names.values() if name in columns or plain(name) in (*ARMS, *SEEDS)]
    parts = [name for name in parts if all(row.values.get(name) not in ("", None) for row in rows)]
    last_rows: dict[tuple[str, ...], Row] = {}
    losses: dict[tuple[str, ...], list[tuple[int, str, float]]] = {}
    for row in sorted(rows, key=lambda row: figure_of(row.values.get(step)) or 0.0):
        key = tuple(str(row.values.get(name)) for name in (run, *parts))
        earlier = last_rows.get(key)
        # a row contains only what was logged at its step, so earlier values remain valid
        values = {name: value for name, value in earlier.values.items() if value not in ("", None)} if earlier else {}
        logged = {name: value for name, value in row.values.items() if value not in ("", None)}
        losses.setdefault(key, []).extend(_losses(logged, figure_of(row.values.get(step))))
        last_rows[key] = Row(row.line, values | logged)
    with_losses = (replace(row, losses=tuple(losses[key])) for key, row in last_rows.items())
    return sorted(with_losses, key=lambda row: row.line)


def _losses(logged: dict[str, Any], step: float | None) -> list[tuple[int, str, float]]:
    """Return the losses among the values logged at a step, under our names for them."""
    found = []
    for column, text in logged.items():
        name = next((column[len(before) :] for before in FIGURES if column.lower().startswith(before)), column)
        part = LOSS.fullmatch(name.lower())
        value = figure_of(text)
        if part is not None and value is not None and step is not None:
            found.append((int(step), f"{EVALUATIONS[part.group(1) or 'train']}/loss", value))
    return found
