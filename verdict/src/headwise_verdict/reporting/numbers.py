"""Conversion of a table of runs from any source (CSV, JSON lines, JSON) into a study's folder, which a report reads.

Each row is a run with its arm, its seed and its scores. The exports of Weights & Biases, MLflow and trackio are read
unchanged; for other tools the user names the columns.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise_verdict.files.durable import read_json, write_bytes, write_json
from headwise_verdict.files.errors import StudyError, suggest
from headwise_verdict.files.ownership import REPORT, STUDY, claim, plain_folder
from headwise_verdict.reporting.cell_values import INFINITE, figure_of, is_missing, same_value, seed_of
from headwise_verdict.reporting.one_row_per_run import last_of_each_run, named_by_run
from headwise_verdict.reporting.run_states import RunState, state_columns, states_of
from headwise_verdict.reporting.table_columns import (
    ARMS,
    SEEDS,
    column_of,
    declared_settings,
    figure_column,
    settings_of_format,
    unasked_columns,
)
from headwise_verdict.reporting.table_rows import Row, names_of, read_rows
from headwise_verdict.results.declarations import declared_outcomes
from headwise_verdict.results.digests import RESULT, digest_of, digests, sealed
from headwise_verdict.results.folder import sealed_study
from headwise_verdict.results.records import MetricRecord, RunEntry, RunResult, StudyRecord
from headwise_verdict.results.stored import checked_study

# largest number of faults of a kind that are listed by row
LISTED = 5
# the file of a run's curves
CURVES = "metrics.jsonl"
# the name of a run's folder
HASH = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True)
class TableRun:
    """A run read from a table: its row, arm, seed, state, and its figures by outcome, None if it did not finish.

    `infinite` names the outcomes for which a finished run has an infinite number, which is none of its figures.
    """

    row: Row
    arm: str
    seed: int
    figures: dict[str, float | None]
    state: RunState
    infinite: frozenset[str] = frozenset()

    @property
    def diverged(self) -> bool:
        """Return whether the run diverged."""
        return self.state.kind == "diverged"


def study_of_numbers(
    path: Path,
    outcomes: Sequence[str],
    baseline: str,
    out: Path,
    *,
    arm: str = "",
    seed: str = "",
    settings: Sequence[str] = (),
) -> list[str]:
    """Write the folder of a study from a table, and return notes on rows that form no pair.

    Args:
        path: the table.
        outcomes: as for `--outcome`, the primary one first: "accuracy:higher".
        baseline: the arm that the others are compared with.
        out: the folder.
        arm: the column of the arms; "" searches for it.
        seed: the column of the seeds; "" searches for it.
        settings: the columns in which rows of one arm must agree; () takes those that an export marks as settings.

    Raises:
        StudyError: if a column is missing, a row has no arm or seed, two rows have the same arm and seed, or rows of
            one arm have different settings; the rows are named.
    """
    metrics = declared_outcomes(outcomes)
    if not metrics:
        raise StudyError(
            f"{path}: no outcome is named. Give --outcome NAME:higher or NAME:lower, such as --outcome accuracy:higher."
        )
    rows, of_names = named_by_run(read_rows(path), bool(arm or seed))
    rows = last_of_each_run(rows, [arm, seed])
    names = names_of(rows)
    columns = {
        "arm": column_of(names, arm, ARMS, "--arm", path),
        "seed": column_of(names, seed, SEEDS, "--seed-column", path),
    }
    figure_columns = {metric.name: figure_column(names, metric.name, path) for metric in metrics}
    _refuse_one_outcome_twice(path, figure_columns)
    used = {*columns.values(), *figure_columns.values()}
    stated = state_columns(names, used)
    cells = _cells(path, rows, columns, figure_columns, states_of([row.values for row in rows], stated))
    arms = list(dict.fromkeys(cell.arm for cell in cells))
    if baseline not in arms:
        raise StudyError(
            f"{path} has no arm {baseline!r}.{suggest(baseline, arms)} Arms: {', '.join(arms)}. Name one: "
            f"--baseline {arms[0]!r}."
        )
    if not any(cell.diverged or cell.state.kind == "finished" for cell in cells):
        said = ", ".join(dict.fromkeys(cell.state.text for cell in cells))
        raise StudyError(f"{path} has no finished run; its states are {said}. Write finished for runs that finished.")
    _refuse_percents(path, cells, metrics)
    _refuse_repeated_cells(path, cells)
    declared = declared_settings(names, settings, path) if settings else settings_of_format(names)
    _refuse_mixed_settings(path, cells, [name for name in declared or () if name not in used])
    notes = [
        *of_names,
        *_gaps(cells, [baseline, *(label for label in arms if label != baseline)], metrics[0].name),
        *_unknown_states(cells),
        *(_question(cells, unasked_columns(names, {*used, *stated})) if declared is None else ()),
    ]
    _write(path, cells, metrics, baseline, out, notes)
    return notes


def _cells(
    path: Path,
    rows: list[Row],
    columns: dict[str, str],
    figure_columns: dict[str, str],
    states: Sequence[RunState],
) -> list[TableRun]:
    cells, wrong = [], []
    for row, state in zip(rows, states):
        arm, seed = str(row.values.get(columns["arm"], "")).strip(), seed_of(row.values.get(columns["seed"]))
        if not arm:
            wrong.append(f"row {row.line} has no {columns['arm']}")
        elif seed is None:
            wrong.append(
                f"row {row.line} has {row.values.get(columns['seed'])!r} for {columns['seed']}, which is not a whole "
                "number"
            )
        else:
            values = {name: row.values.get(column) for name, column in figure_columns.items()}
            wrong += [
                f"row {row.line} has {value!r} for {name}, which is not a number"
                for name, value in values.items()
                if figure_of(value) is None and not is_missing(value)
            ]
            figures = {name: figure_of(value) if state.kind == "finished" else None for name, value in values.items()}
            infinite = {n for n, v in values.items() if state.kind == "finished" and str(v).strip().lower() in INFINITE}
            cells.append(TableRun(row, arm, seed, figures, state, frozenset(infinite)))
    _refuse(path, wrong, "Repair the rows.")
    return cells


def _refuse_percents(path: Path, cells: list[TableRun], metrics: Sequence[MetricRecord]) -> None:
    """Raise StudyError if figures that are declared as shares are percents: 52.5 would be shown as 5,250 %."""
    for metric in metrics:
        direction = "higher" if metric.higher_is_better else "lower"
        wrong = [
            f"row {cell.row.line} has {value} for {metric.name}, whose unit % is for shares in [0, 1]"
            for cell in cells
            # differences of shares, such as a gap, may be negative
            if metric.unit == "%" and (value := cell.figures[metric.name]) is not None and abs(value) > 1
        ]
        _refuse(path, wrong, f"For percents, write --outcome {metric.name}:{direction}:percent.")


def _refuse_one_outcome_twice(path: Path, figure_columns: dict[str, str]) -> None:
    for of in (figure_columns, {name: _stored(name) for name in figure_columns}):
        first: dict[str, str] = {}
        for name, place in of.items():
            if place in first:
                raise StudyError(
                    f"{path}: --outcome {first[place]} and --outcome {name} are both {place}. Give it once."
                )
            first[place] = name


def _stored(name: str) -> str:
    """Return the name of an outcome in the study: one with a slash names its evaluation itself."""
    return name if "/" in name else f"test/{name}"


def _refuse_repeated_cells(path: Path, cells: list[TableRun]) -> None:
    by_cell: dict[tuple[str, int], list[int]] = defaultdict(list)
    for cell in cells:
        by_cell[cell.arm, cell.seed].append(cell.row.line)
    wrong = [
        f"rows {' and '.join(map(str, lines))} are both {arm}, seed {seed}"
        for (arm, seed), lines in by_cell.items()
        if len(lines) > 1
    ]
    _refuse(path, wrong, "A pair needs one run of each arm: remove the others.")


def _refuse_mixed_settings(path: Path, cells: list[TableRun], settings: Iterable[str]) -> None:
    """Raise StudyError if rows of one arm differ in a setting."""
    wrong = []
    for name in settings:
        for own in _by_arm(cells).values():
            values = [cell.row.values.get(name) for cell in own]
            usual = Counter(map(str, values)).most_common(1)[0][0]
            first = next(cell for cell, value in zip(own, values) if str(value) == usual)
            wrong += [
                f"row {cell.row.line} has {name} {_shown(value)}, and row {first.row.line} of the same arm {cell.arm} "
                f"has {_shown(first.row.values.get(name))}"
                for cell, value in zip(own, values)
                if not same_value(value, first.row.values.get(name))
            ]
    _refuse(
        path,
        wrong,
        "One arm is one configuration: give them different arms, or name the columns that are settings: --settings "
        "NAME,NAME.",
    )


def _by_arm(cells: list[TableRun]) -> dict[str, list[TableRun]]:
    by_arm: dict[str, list[TableRun]] = {}
    for cell in cells:
        by_arm.setdefault(cell.arm, []).append(cell)
    return by_arm


def _shown(value: Any) -> str:
    return "empty" if value in ("", None) else str(value)


def _question(cells: list[TableRun], names: Iterable[str]) -> list[str]:
    """Return the note that asks which of the columns that differ within an arm are settings."""
    arms = _by_arm(cells).values()
    open_ = [
        name
        for name in names
        if any(not same_value(cell.row.values.get(name), own[0].row.values.get(name)) for own in arms for cell in own)
    ]
    if not open_:
        return []
    more = f" and {len(open_) - LISTED} more" if len(open_) > LISTED else ""
    return [
        f"rows of one arm differ in {', '.join(open_[:LISTED])}{more}. If one is a setting, name it and it is checked: "
        f"--settings {open_[0]}."
    ]


def _unknown_states(cells: list[TableRun]) -> list[str]:
    """Return the notes on states that are not known, each with its rows."""
    rows: dict[str, list[int]] = {}
    for cell in cells:
        if cell.state.kind == "unknown":
            rows.setdefault(cell.state.text, []).append(cell.row.line)
    return [
        f"{_rows(lines)} {'have' if len(lines) > 1 else 'has'} the state {text!r}, which is not known to mean that a "
        "run finished: its figures are not used. If it did, write finished."
        for text, lines in rows.items()
    ]


def _rows(lines: list[int]) -> str:
    more = f" and {len(lines) - LISTED} more" if len(lines) > LISTED else ""
    return f"row{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines[:LISTED]))}{more}"


def _gaps(cells: list[TableRun], arms: list[str], outcome: str) -> list[str]:
    by_cell = {(cell.arm, cell.seed): cell for cell in cells}
    notes = []
    for arm in arms:
        for seed in sorted({cell.seed for cell in cells}):
            cell = by_cell.get((arm, seed))
            if cell is None:
                notes.append(f"{arm} has no row of seed {seed}: this seed makes no pair.")
                continue
            place, state = f"row {cell.row.line} ({arm}, seed {seed})", cell.state
            if cell.diverged:
                notes.append(f"{place} diverged.")
            elif state.kind != "finished":
                notes.append(f"{place} is not finished ({state.text}): this seed makes no pair.")
            elif outcome in cell.infinite:
                notes.append(
                    f"{place} has an infinite {outcome}: this seed makes no pair. If the run diverged, add a column "
                    "`state` that says diverged: left out, it flatters its arm."
                )
            elif cell.figures[outcome] is None:
                why = f" ({state.text})" if state.text else ""
                notes.append(f"{place} has no {outcome}{why}: this seed makes no pair.")
    return notes


def _refuse(path: Path, wrong: list[str], remedy: str) -> None:
    if wrong:
        rest = f"; and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
        raise StudyError(f"{path}: {'; '.join(wrong[:LISTED])}{rest}. {remedy}")


def _write(
    path: Path, cells: list[TableRun], metrics: list[MetricRecord], baseline: str, out: Path, notes: list[str]
) -> None:
    """Write the study of a table in the files of any study, replacing an earlier study of the same table."""
    study_file = out / "study.json"
    earlier = read_json(study_file)
    if isinstance(earlier, dict) and earlier.get("kind") != "numbers":
        raise StudyError(f"{out} already contains another study. Choose another --out.")
    if path.name in REPORT and path.resolve().parent == out.resolve():
        raise StudyError(f"{out} holds the table itself, and a report replaces what is there. Choose another --out.")
    claim(out, (*STUDY, *REPORT))
    if study_file.is_file():
        _remove_runs(out, checked_study(study_file).runs)
    entries = []
    for cell in cells:
        if not cell.diverged and all(value is None for value in cell.figures.values()):
            continue
        config = {"arm": cell.arm, "seed": cell.seed, "table": path.name, "row": cell.row.line, "figures": cell.figures}
        identity = digest_of(config)[:12]
        folder = plain_folder(plain_folder(out / "runs") / identity)
        write_json(folder / "config.json", config)
        if cell.row.losses:
            write_bytes(folder / CURVES, _curves(cell.row))
        result = RunResult(
            format=2,
            status="diverged" if cell.diverged else "finished",
            arm=cell.arm,
            seed=cell.seed,
            hash=identity,
            metrics={_stored(name): value for name, value in cell.figures.items()},
            digests=digests(folder),
            config=config,
        )
        write_json(folder / RESULT, sealed(result.model_dump(mode="json")))
        entries.append(RunEntry(hash=identity, arm=cell.arm, seed=cell.seed))
    arms = [baseline, *dict.fromkeys(cell.arm for cell in cells if cell.arm != baseline)]
    record = StudyRecord(
        format=2,
        name=path.stem,
        title=path.stem,
        kind="numbers",
        arms=arms,
        baseline=baseline,
        seeds=sorted({cell.seed for cell in cells}),
        primary=_stored(metrics[0].name),
        metrics=metrics,
        evaluations=["test"],
        settings={"table": path.name},
        runs=list(entries),
        notes=[*notes, f"The numbers come from {path.name}; how they were made is not known here."],
    )
    write_json(study_file, sealed_study(record).model_dump(mode="json"))


def _curves(row: Row) -> bytes:
    """Return the losses of a run, from a table with a row per step, as the lines of a study's curves."""
    by_step: dict[int, dict[str, float]] = {}
    for step, name, value in row.losses:
        by_step.setdefault(step, {})[name] = value
    lines = [{"epoch": at, "step": step, "metrics": found} for at, (step, found) in enumerate(by_step.items(), 1)]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def _remove_runs(out: Path, runs: Sequence[RunEntry]) -> None:
    """Remove the runs of an earlier version of the table, and nothing else."""
    for entry in runs:
        folder = out / "runs" / entry.hash
        if not HASH.fullmatch(entry.hash) or folder.is_symlink():
            continue
        for name in ("config.json", CURVES, RESULT):
            (folder / name).unlink(missing_ok=True)
        # it stays if somebody put files there
        with contextlib.suppress(OSError):
            folder.rmdir()
