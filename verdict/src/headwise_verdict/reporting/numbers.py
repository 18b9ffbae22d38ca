"""Conversion of a table of runs from any source (CSV, JSON lines, JSON) into a study's folder, which a report reads.

Each row is a run with its arm, its seed and its scores. Exports of Weights & Biases, MLflow, trackio, Optuna and Ray
are read unchanged; for other tools the user names the columns.
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
from headwise_verdict.reporting.table_columns import (
    ARMS,
    FINISHED,
    SEEDS,
    RunState,
    column_of,
    declared_settings,
    figure_column,
    last_of_each_run,
    settings_of_format,
    state_columns,
    states_of,
    unasked_columns,
)
from headwise_verdict.reporting.table_rows import (
    INFINITE,
    Row,
    figure_of,
    is_missing,
    names_of,
    read_rows,
    same_value,
    seed_of,
)
from headwise_verdict.results.digests import RESULT, digest_of, digests, sealed
from headwise_verdict.results.folder import sealed_study
from headwise_verdict.results.records import MetricRecord, RunEntry, RunResult, StudyRecord, declared_outcomes
from headwise_verdict.results.stored import checked_study

# largest number of faults of a kind that are listed by row
LISTED = 5
# the file of a run's curves
CURVES = "metrics.jsonl"
# the name of a run's folder
HASH = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True)
class TableRun:
    """A run read from a table: its row, arm, seed and state, and its cells by outcome."""

    row: Row
    arm: str
    seed: int
    cells: dict[str, Any]
    state: RunState

    @property
    def figures(self) -> dict[str, float | None]:
        """Return its figures by outcome; None for one that it lacks, and for all of a run that did not finish."""
        finished = self.state.kind == "finished"
        return {name: figure_of(value) if finished else None for name, value in self.cells.items()}

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
        arm: the column of the arms; "": a usual name.
        seed: the column of the seeds; "": a usual name.
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
    rows = last_of_each_run(read_rows(path), [arm, seed])
    names = names_of(rows)
    columns = {
        "arm": column_of(names, arm, ARMS, "--arm", path),
        "seed": column_of(names, seed, SEEDS, "--seed-column", path),
    }
    figure_columns = {metric.name: figure_column(names, metric.name, path) for metric in metrics}
    _refuse_one_outcome_twice(path, figure_columns)
    used = {*columns.values(), *figure_columns.values()}
    stated = state_columns(names, used)
    runs = _runs(path, rows, columns, figure_columns, states_of([row.values for row in rows], stated))
    arms = list(dict.fromkeys(run.arm for run in runs))
    if baseline not in arms:
        raise StudyError(
            f"{path} has no arm {baseline!r}.{suggest(baseline, arms)} Arms: {', '.join(arms)}. Name one: "
            f"--baseline {arms[0]!r}."
        )
    if all(run.state.kind == "unfinished" for run in runs):
        said = ", ".join(dict.fromkeys(run.state.text for run in runs))
        raise StudyError(f"{path} has no finished run; its states are {said}. Write finished for runs that finished.")
    _refuse_percents(path, runs, metrics)
    _refuse_repeated_runs(path, runs)
    marked = declared_settings(names, settings, path) if settings else settings_of_format(names)
    _refuse_mixed_settings(path, runs, [name for name in marked if name not in used])
    arms = [baseline, *(label for label in arms if label != baseline)]
    notes = _gaps(runs, arms, metrics[0].name)
    if any(run.state.kind == "unfinished" for run in runs):
        notes.append(f"a run counts as finished if its state is {', '.join(FINISHED[:-1])} or {FINISHED[-1]}.")
    if not marked:
        notes += _question(runs, unasked_columns(names, {*used, *stated}))
    _write(path, runs, metrics, arms, out, notes)
    return notes


def _runs(
    path: Path, rows: list[Row], columns: dict[str, str], figure_columns: dict[str, str], states: Sequence[RunState]
) -> list[TableRun]:
    runs, wrong = [], []
    for row, state in zip(rows, states):
        written = row.values.get(columns["seed"])
        arm, seed = str(row.values.get(columns["arm"], "")).strip(), seed_of(written)
        cells = {name: row.values.get(column) for name, column in figure_columns.items()}
        if not arm:
            wrong.append(f"row {row.line} has no {columns['arm']}")
        elif seed is None:
            wrong.append(f"row {row.line} has {written!r} for {columns['seed']}, which is not a whole number")
        else:
            wrong += [
                f"row {row.line} has {value!r} for {name}, which is not a number"
                for name, value in cells.items()
                if figure_of(value) is None and not is_missing(value)
            ]
            runs.append(TableRun(row, arm, seed, cells, state))
    _refuse(path, wrong, "Repair the rows.")
    return runs


def _refuse_percents(path: Path, runs: list[TableRun], metrics: Sequence[MetricRecord]) -> None:
    """Raise StudyError if figures that are declared as shares are percents: 52.5 would be shown as 5,250 %."""
    for metric in metrics:
        direction = "higher" if metric.higher_is_better else "lower"
        wrong = [
            f"row {run.row.line} has {value} for {metric.name}, whose unit % is for shares in [0, 1]"
            for run in runs
            # differences of shares, such as a gap, may be negative
            if metric.unit == "%" and (value := run.figures[metric.name]) is not None and abs(value) > 1
        ]
        _refuse(path, wrong, f"For percents, write --outcome {metric.name}:{direction}:percent.")


def _refuse_one_outcome_twice(path: Path, figure_columns: dict[str, str]) -> None:
    for of in (figure_columns, {name: _stored(name) for name in figure_columns}):
        first: dict[str, str] = {}
        for name, place in of.items():
            if first.setdefault(place, name) != name:
                raise StudyError(
                    f"{path}: --outcome {first[place]} and --outcome {name} are both {place}. Give it once."
                )


def _stored(name: str) -> str:
    """Return the name of an outcome in the study: one with a slash names its evaluation itself."""
    return name if "/" in name else f"test/{name}"


def _refuse_repeated_runs(path: Path, runs: list[TableRun]) -> None:
    lines: dict[tuple[str, int], list[str]] = defaultdict(list)
    for run in runs:
        lines[run.arm, run.seed].append(str(run.row.line))
    wrong = [f"rows {' and '.join(of)} are both {arm}, seed {seed}" for (arm, seed), of in lines.items() if len(of) > 1]
    _refuse(path, wrong, "A pair needs one run of each arm: remove the others.")


def _refuse_mixed_settings(path: Path, runs: list[TableRun], settings: Iterable[str]) -> None:
    """Raise StudyError if rows of one arm differ in a setting."""
    wrong = []
    for name in settings:
        for own in _by_arm(runs).values():
            values = [run.row.values.get(name) for run in own]
            usual = Counter(map(str, values)).most_common(1)[0][0]
            first = next(run.row for run, value in zip(own, values) if str(value) == usual)
            wrong += [
                f"row {run.row.line} has {name} {_shown(value)}, and row {first.line} of the same arm {run.arm} "
                f"has {_shown(first.values.get(name))}"
                for run, value in zip(own, values)
                if not same_value(value, first.values.get(name))
            ]
    remedy = "One arm is one configuration: give them different arms, or name the columns that are settings: --settings"
    _refuse(path, wrong, f"{remedy} NAME,NAME.")


def _by_arm(runs: list[TableRun]) -> dict[str, list[TableRun]]:
    by_arm: dict[str, list[TableRun]] = {}
    for run in runs:
        by_arm.setdefault(run.arm, []).append(run)
    return by_arm


def _shown(value: Any) -> str:
    return "empty" if value in ("", None) else str(value)


def _question(runs: list[TableRun], names: Iterable[str]) -> list[str]:
    """Return the note that asks which of the columns that differ within an arm are settings."""
    arms = _by_arm(runs).values()
    open_ = [
        name
        for name in names
        if any(not same_value(run.row.values.get(name), own[0].row.values.get(name)) for own in arms for run in own)
    ]
    if not open_:
        return []
    more = f" and {len(open_) - LISTED} more" if len(open_) > LISTED else ""
    return [
        f"rows of one arm differ in {', '.join(open_[:LISTED])}{more}. If one is a setting, name it and it is checked: "
        f"--settings {open_[0]}."
    ]


def _gaps(runs: list[TableRun], arms: list[str], outcome: str) -> list[str]:
    """Return a note for each seed of an arm that makes no pair."""
    by_place = {(run.arm, run.seed): run for run in runs}
    notes = []
    for arm in arms:
        for seed in sorted({run.seed for run in runs}):
            run = by_place.get((arm, seed))
            if run is None:
                notes.append(f"{arm} has no row of seed {seed}: this seed makes no pair.")
                continue
            place, text = f"row {run.row.line} ({arm}, seed {seed})", run.state.text
            if run.diverged:
                notes.append(f"{place} diverged.")
            elif run.state.kind != "finished":
                notes.append(f"{place} is not finished ({text}): this seed makes no pair.")
            elif str(run.cells[outcome]).strip().lower() in INFINITE:
                notes.append(
                    f"{place} has an infinite {outcome}: this seed makes no pair. If the run diverged, add a column "
                    "`state` that says diverged: left out, it flatters its arm."
                )
            elif run.figures[outcome] is None:
                notes.append(f"{place} has no {outcome}{text and f' ({text})'}: this seed makes no pair.")
    return notes


def _refuse(path: Path, wrong: list[str], remedy: str) -> None:
    if wrong:
        rest = f"; and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
        raise StudyError(f"{path}: {'; '.join(wrong[:LISTED])}{rest}. {remedy}")


def _write(
    path: Path, runs: list[TableRun], metrics: list[MetricRecord], arms: list[str], out: Path, notes: list[str]
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
    for run in runs:
        if not run.diverged and all(value is None for value in run.figures.values()):
            continue
        config = {"arm": run.arm, "seed": run.seed, "table": path.name, "row": run.row.line, "figures": run.figures}
        entry = RunEntry(hash=digest_of(config)[:12], arm=run.arm, seed=run.seed)
        folder = plain_folder(plain_folder(out / "runs") / entry.hash)
        write_json(folder / "config.json", config)
        if run.row.losses:
            write_bytes(folder / CURVES, _curves(run.row))
        result = RunResult(
            status="diverged" if run.diverged else "finished",
            metrics={_stored(name): value for name, value in run.figures.items()},
            digests=digests(folder),
            config=config,
            **entry.model_dump(),
        )
        write_json(folder / RESULT, sealed(result.model_dump(mode="json")))
        entries.append(entry)
    record = StudyRecord(
        name=path.stem,
        title=path.stem,
        kind="numbers",
        arms=arms,
        baseline=arms[0],
        seeds=sorted({run.seed for run in runs}),
        primary=_stored(metrics[0].name),
        metrics=metrics,
        evaluations=["test"],
        settings={"table": path.name},
        runs=entries,
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
