"""Conversion of a table of runs from any source (CSV, JSON lines, JSON) into a study's folder, which a report reads.

Each row is a run with its arm, its seed and its scores. The exports of Weights & Biases, MLflow and trackio are read
unchanged; for other tools the user names the columns.
"""

from __future__ import annotations

import ast
import csv
import json
import math
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.core.settings import suggest
from headwise.files.durable import write_json
from headwise.files.errors import StudyError
from headwise.results.digests import RESULT, digest_of, digests, sealed
from headwise.results.folder import ledger_of
from headwise.results.records import MetricRecord, RunEntry, RunResult, StudyRecord

if TYPE_CHECKING:
    from headwise.experiments.evaluation import Metric

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json")
ARMS = ("arm", "method", "group")
SEEDS = ("seed", "random_seed", "data_seed")
STATES = ("status", "state")
STEPS = ("step", "_step", "global_step")
RUNS = ("run_id", "run id", "run", "run_name", "id", "name")
# columns of run names, and the names that contain arm and seed: plain-3, plain_seed3, "DropHead(p=0.1), seed 3"
RUN_NAMES = ("run_name", "run", "name", "mlflow.runname")
NAMED = re.compile(r"(.*?[^\s,_/|:=-])(?:[\s,_/|:=-]+(?:seed|s)?|seed)[\s,_/|:=-]*(\d+)", re.IGNORECASE)
# prefixes by which exports distinguish settings from figures
SETTINGS = ("params.", "config.", "config/")
FIGURES = ("metrics.", "summary.", "summary/")
FAILED = ("failed", "crashed", "killed", "running", "scheduled", "unfinished", "damaged")
# columns that describe a run but are not settings
TIMES = ("created", "updated", "start time", "start_time", "end_time", "duration", "runtime", "_runtime", "timestamp")
NOTES = ("notes", "user", "tags", "source name", "source type", "artifact_uri", "experiment_id", "diverged_at_step")
MACHINES = ("hostname", "host", "sweep", "agent", "description", "job type", "github", "os", "python version", "commit")
DEVICES = ("gpu type", "gpu count", "cpu count")
MORE_TIMES = ("end time", "relative time", "heartbeatat")
# columns that contain a whole dict, as written by Weights & Biases' recommended export and trackio's query
DICTS = ("config", "summary", "metrics")
# first columns of the CSV from Weights & Biases' page; settings and then figures follow, each in alphabetical order
OF_WANDB = ("name", "state", "created", "runtime")
OF_THE_RUN = (*RUNS, *STATES, *STEPS, *SEEDS, *TIMES, *MORE_TIMES, *NOTES, *MACHINES, *DEVICES, "_timestamp")
# texts that replace a figure that a run lacks
MISSING = ("", "nan", "none", "null", "inf", "-inf", "infinity")
# largest number of faults of a kind that are listed by row
LISTED = 5
TAB = "\t"
# numbers with a decimal comma, as in spreadsheets whose fields are separated by semicolons
DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+(e[+-]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Row:
    """One row of a table; `line` is its line in an editor, where the heading is line 1."""

    line: int
    values: dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A run read from a table: its row, arm, seed, figures by outcome, and whether it diverged."""

    row: Row
    arm: str
    seed: int
    figures: dict[str, float | None]
    diverged: bool


def is_table(path: Path) -> bool:
    """Return whether a path is a table of numbers rather than a folder."""
    return path.is_file() or path.suffix.lower() in SUFFIXES


def study_of_numbers(
    path: Path, outcomes: Sequence[str], baseline: str, out: Path, *, arm: str = "", seed: str = ""
) -> list[str]:
    """Write the folder of a study from a table, and return notes on rows that form no pair.

    Args:
        path: the table.
        outcomes: as for `--outcome`, the primary one first: "accuracy:higher".
        baseline: the arm that the others are compared with.
        out: the folder.
        arm: the column of the arms; "" searches for it.
        seed: the column of the seeds; "" searches for it.

    Raises:
        StudyError: if a column is missing, a row has no arm or seed, two rows have the same arm and seed, or rows of
            one arm have different settings; the rows are named.
    """
    # imports torch, which the report of a study does without
    from headwise.experiments.script import read_outcome

    metrics = [read_outcome(text) for text in outcomes]
    if not metrics:
        raise StudyError(
            f"{path}: no outcome is named. Give --outcome NAME:higher or NAME:lower, such as --outcome accuracy:higher."
        )
    rows, of_names = _named_by_run(read_rows(path), bool(arm or seed))
    rows = _last_of_each_run(rows, arm, seed)
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    columns = {
        "arm": _column(names, arm, ARMS, "--arm", path),
        "seed": _column(names, seed, SEEDS, "--seed-column", path),
    }
    figure_columns = {metric.name: _figure_column(names, metric.name, path) for metric in metrics}
    cells = _cells(path, rows, columns, figure_columns)
    arms = list(dict.fromkeys(cell.arm for cell in cells))
    if baseline not in arms:
        raise StudyError(
            f"{path} has no arm {baseline!r}.{suggest(baseline, arms)} Arms: {', '.join(arms)}. Name one: "
            f"--baseline {arms[0]!r}."
        )
    _refuse_repeated_cells(path, cells)
    _refuse_mixed_settings(path, cells, {*columns.values(), *figure_columns.values(), *_figures_of_wandb(names)})
    notes = of_names + _gaps(cells, [baseline, *(label for label in arms if label != baseline)], metrics[0].name)
    _write(path, cells, metrics, baseline, out, notes)
    return notes


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a table: CSV or TSV with a heading, or JSON objects, one per line or in a list.

    Entries of nested objects are named with dots.

    Raises:
        StudyError: if the file is missing or empty, or a line is not a row.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise StudyError(f"{path} does not exist in {Path.cwd()}. Give the path of a CSV or JSONL file.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise StudyError(f"{path} cannot be read as text ({error}). Give a CSV or JSONL file in UTF-8.") from error
    readers = {".json": _of_whole_json, ".jsonl": _of_json, ".ndjson": _of_json}
    rows = list(readers.get(path.suffix.lower(), _of_csv)(path, text))
    if not rows:
        raise StudyError(f"{path} contains no rows. Give a table with a heading and one row per run.")
    return rows


def _of_json(path: Path, text: str) -> Iterable[Row]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise StudyError(
                f"{path}, line {number}, is not valid JSON: {why[0].lower()}{why[1:]}. Complete the line, or delete it "
                "if its writer was interrupted."
            ) from error
        if not isinstance(record, dict):
            raise StudyError(
                f'{path}, line {number}, is not a JSON object. Give one run per line: {{"arm": ..., "seed": ...}}.'
            )
        yield Row(number, _unfolded(path, number, _flat(record)))


def _of_whole_json(path: Path, text: str) -> Iterable[Row]:
    """Yield the rows of a JSON list of runs, or of the output of `trackio query --json`, whose "rows" is the list."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise StudyError(
            f"{path} is not valid JSON: {error}. Give a list of runs, or one run per line in a .jsonl file."
        ) from error
    rows = content.get("rows") if isinstance(content, dict) else content
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise StudyError(f'{path} contains no list of runs. Write [{{"arm": ..., "seed": ...}}, ...].')
    for number, row in enumerate(rows, 1):
        yield Row(number, _unfolded(path, number, _flat(row)))


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in nested.items():
        values |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return values


def _of_csv(path: Path, text: str) -> Iterable[Row]:
    lines = text.splitlines(keepends=True)
    heading = lines[0] if lines else ""
    mark = TAB if path.suffix.lower() == ".tsv" else ";" if heading.count(";") > heading.count(",") else ","
    reader = csv.reader(lines, delimiter=mark)
    names: list[str] = []
    for values in reader:
        if not names:
            names = [name.strip() for name in values]
            repeated = [name for name, count in Counter(names).items() if count > 1 and name]
            if repeated:
                raise StudyError(f"{path} has two columns {repeated[0]!r}. Rename one.")
        elif any(value.strip() for value in values):
            if len(values) != len(names):
                raise StudyError(
                    f"{path}, row {reader.line_num}, has {len(values)} fields and the heading {len(names)}. Put "
                    f"a field that holds {'a tab' if mark == TAB else repr(mark)} into quotes, or repair the row."
                )
            if mark == ";":
                values = [v.replace(",", ".") if DECIMAL_COMMA.fullmatch(v.strip()) else v for v in values]
            yield Row(reader.line_num, _unfolded(path, reader.line_num, dict(zip(names, map(str.strip, values)))))


def _unfolded(path: Path, line: int, values: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose cells that contain a dict, in Python or JSON syntax, are replaced by its entries."""
    entries: dict[str, Any] = {}
    for name, value in values.items():
        if name.lower() not in DICTS or not isinstance(value, str) or not value.startswith("{"):
            entries[name] = value
            continue
        try:
            # Python writes nan and inf, which literal_eval does not read
            content = ast.literal_eval(re.sub(r"(?<=: )-?(nan|inf)(?=[,}])", "None", value))
        except (ValueError, SyntaxError):
            try:
                content = json.loads(value)
            except ValueError as error:
                raise StudyError(
                    f"{path}, row {line}: {name} is not a readable dict. Export its entries as columns."
                ) from error
        entries |= _flat(content, f"{name.lower()}.")
    return entries


def _named_by_run(rows: list[Row], columns_named: bool) -> tuple[list[Row], list[str]]:
    """Return the rows with arm and seed taken from the runs' names if no column contains them, and a note on it.

    The CSV of a plot of trackio's dashboard is such a table. `columns_named`: whether the user named a column.
    """
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    by_plain_name = {_plain(name): name for name in reversed(names)}
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


def _last_of_each_run(rows: list[Row], arm: str, seed: str) -> list[Row]:
    """Return the last row of each run if a table has a row per step, as trackio's tables do."""
    names = {name.lower(): name for row in rows for name in row.values}
    step, run = (next((names[name] for name in names_tried if name in names), None) for names_tried in (STEPS, RUNS))
    if step is None or run is None:
        return rows
    # a run name that two arms or seeds share, such as a number within each, denotes two runs
    parts = [name for name in names.values() if name in (arm, seed) or _plain(name) in (*ARMS, *SEEDS)]
    parts = [name for name in parts if all(row.values.get(name) not in ("", None) for row in rows)]
    last_rows: dict[tuple[str, ...], Row] = {}
    for row in sorted(rows, key=lambda row: _float(row.values.get(step)) or 0.0):
        key = tuple(str(row.values.get(name)) for name in (run, *parts))
        earlier = last_rows.get(key)
        # a row contains only what was logged at its step, so earlier values remain valid
        values = {name: value for name, value in earlier.values.items() if value not in ("", None)} if earlier else {}
        last_rows[key] = Row(row.line, values | {n: v for n, v in row.values.items() if v not in ("", None)})
    return sorted(last_rows.values(), key=lambda row: row.line)


def _column(names: list[str], requested: str, candidates: Sequence[str], option: str, path: Path) -> str:
    if requested:
        if requested not in names:
            raise StudyError(
                f"{option} {requested!r}: {path} has no such column.{suggest(requested, names)} Columns: "
                f"{', '.join(names)}."
            )
        return requested
    plain = {_plain(name): name for name in reversed(names)}
    match = next((plain[name] for name in candidates if name in plain), None)
    if match is None:
        raise StudyError(
            f"{path} has no column {candidates[0]}. Columns: {', '.join(names)}. Name the column with {option} NAME."
        )
    return match


def _figure_column(names: list[str], name: str, path: Path) -> str:
    own = (name, f"test/{name}")
    for candidate in (*own, *(f"{before}{each}" for each in own for before in FIGURES)):
        if candidate in names:
            return candidate
    raise StudyError(f"--outcome {name}: {path} has no such column.{suggest(name, names)} Columns: {', '.join(names)}.")


def _figures_of_wandb(names: list[str]) -> list[str]:
    """Return the figures in the CSV of Weights & Biases' page: the columns from where the alphabet starts again."""
    lower = [name.lower() for name in names]
    if not set(OF_WANDB) <= set(lower):
        return []
    begin = 1 + max(at for at, name in enumerate(lower) if name in (*OF_WANDB, "sweep"))
    for keys in (names, lower):
        falls = [at for at in range(begin + 1, len(names)) if keys[at] < keys[at - 1]]
        if len(falls) == 1:
            return names[falls[0] :]
    return []


def _plain(name: str) -> str:
    lower = name.lower()
    return next((lower.removeprefix(before) for before in (*SETTINGS, "tags.") if lower.startswith(before)), lower)


def _cells(path: Path, rows: list[Row], columns: dict[str, str], figure_columns: dict[str, str]) -> list[Cell]:
    cells, wrong = [], []
    for row in rows:
        arm, seed = str(row.values.get(columns["arm"], "")).strip(), _float(row.values.get(columns["seed"]))
        if not arm:
            wrong.append(f"row {row.line} has no {columns['arm']}")
        elif seed is None or seed != int(seed):
            wrong.append(
                f"row {row.line} has {row.values.get(columns['seed'])!r} for {columns['seed']}, which is not a whole "
                "number"
            )
        else:
            state = _state(row)
            failed = any(word in state for word in FAILED) or "diverged" in state
            figures = {
                name: None if failed else _float(row.values.get(column)) for name, column in figure_columns.items()
            }
            for name, column in figure_columns.items():
                value = row.values.get(column)
                if _float(value) is None and str(value or "").strip().lower() not in MISSING:
                    wrong.append(f"row {row.line} has {value!r} for {name}, which is not a number")
            cells.append(Cell(row, arm, int(seed), figures, "diverged" in state))
    _refuse(path, wrong, "Repair the rows.")
    return cells


def _state(row: Row) -> str:
    return next((str(value).lower() for name, value in row.values.items() if name.lower() in STATES), "")


def _refuse_repeated_cells(path: Path, cells: list[Cell]) -> None:
    by_cell: dict[tuple[str, int], list[int]] = defaultdict(list)
    for cell in cells:
        by_cell[cell.arm, cell.seed].append(cell.row.line)
    wrong = [
        f"rows {' and '.join(map(str, lines))} are both {arm}, seed {seed}"
        for (arm, seed), lines in by_cell.items()
        if len(lines) > 1
    ]
    _refuse(path, wrong, "A pair needs one run of each arm: remove the others.")


def _refuse_mixed_settings(path: Path, cells: list[Cell], used: set[str]) -> None:
    """Raise StudyError if rows of one arm differ in a setting, as marked by an export or else in a minority of rows."""
    wrong = []
    names = dict.fromkeys(name for cell in cells for name in cell.row.values)
    for name in names:
        # those that begin with _ are columns that trackers add for their own use
        if (
            name in used
            or name.startswith((*FIGURES, "tags."))
            or _plain(name) in OF_THE_RUN
            or _plain(name)[:1] == "_"
        ):
            continue
        for arm in dict.fromkeys(cell.arm for cell in cells):
            own = [cell for cell in cells if cell.arm == arm]
            counts = Counter(str(cell.row.values.get(name, "")) for cell in own)
            (usual, many), *others = counts.most_common()
            is_setting = name.startswith(SETTINGS)
            # figures, names and times differ in every row, so no value is usual
            if not others or not (is_setting or (many > 1 and len(own) - many <= len(own) // 2)):
                continue
            of_usual = next(cell.row.line for cell in own if str(cell.row.values.get(name, "")) == usual)
            wrong += [
                f"row {cell.row.line} has {name} {value or 'empty'}, and row {of_usual} of the same arm {arm} has "
                f"{usual or 'empty'}"
                for cell in own
                if (value := str(cell.row.values.get(name, ""))) != usual
            ]
    _refuse(
        path,
        wrong,
        "One arm is one configuration: give them different arms, or remove the column if it is not a setting.",
    )


def _gaps(cells: list[Cell], arms: list[str], outcome: str) -> list[str]:
    by_cell = {(cell.arm, cell.seed): cell for cell in cells}
    notes = []
    for arm in arms:
        for seed in sorted({cell.seed for cell in cells}):
            cell = by_cell.get((arm, seed))
            if cell is None:
                notes.append(f"{arm} has no row of seed {seed}: this seed makes no pair.")
            elif cell.diverged:
                notes.append(f"row {cell.row.line} ({arm}, seed {seed}) diverged.")
            elif cell.figures[outcome] is None:
                state = _state(cell.row)
                why = f" ({state})" if state else ""
                notes.append(
                    f"row {cell.row.line} ({arm}, seed {seed}) has no {outcome}{why}: this seed makes no pair."
                )
    return notes


def _refuse(path: Path, wrong: list[str], remedy: str) -> None:
    if wrong:
        rest = f"; and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
        raise StudyError(f"{path}: {'; '.join(wrong[:LISTED])}{rest}. {remedy}")


def _float(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _write(path: Path, cells: list[Cell], metrics: list[Metric], baseline: str, out: Path, notes: list[str]) -> None:
    """Write the study of a table in the files of any study, replacing an earlier study of the same table."""
    study_file = out / "study.json"
    if study_file.is_file() and json.loads(study_file.read_text(encoding="utf-8")).get("kind") != "numbers":
        raise StudyError(f"{out} already contains another study. Choose another --out.")
    # runs of an earlier version of the table
    shutil.rmtree(out / "runs", ignore_errors=True)
    entries = []
    for cell in cells:
        if not cell.diverged and all(value is None for value in cell.figures.values()):
            continue
        config = {"arm": cell.arm, "seed": cell.seed, "table": path.name, "row": cell.row.line, "figures": cell.figures}
        identity = digest_of(config)[:12]
        folder = out / "runs" / identity
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", config)
        result = RunResult(
            format=2,
            status="diverged" if cell.diverged else "finished",
            arm=cell.arm,
            seed=cell.seed,
            hash=identity,
            metrics={f"test/{name}": value for name, value in cell.figures.items()},
            digests=digests(folder),
            config=config,
        )
        write_json(folder / RESULT, sealed(result.model_dump(mode="json")))
        entries.append(RunEntry(hash=identity, arm=cell.arm, seed=cell.seed))
    described = [
        MetricRecord(name=m.name, label=m.label, higher_is_better=m.higher_is_better, unit=m.unit, failure=m.failure)
        for m in metrics
    ]
    arms = [baseline, *dict.fromkeys(cell.arm for cell in cells if cell.arm != baseline)]
    record = StudyRecord(
        format=2,
        name=path.stem,
        title=path.stem,
        kind="numbers",
        arms=arms,
        baseline=baseline,
        seeds=sorted({cell.seed for cell in cells}),
        primary=f"test/{metrics[0].name}",
        metrics=described,
        evaluations=["test"],
        settings={"table": path.name},
        runs=list(entries),
        ledger=ledger_of(entries),
        notes=[*notes, f"The numbers are those of {path.name}; what made them is not known here."],
    )
    write_json(study_file, record.model_dump(mode="json"))
