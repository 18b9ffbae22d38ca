"""Numbers from anywhere: a table of runs (CSV, JSON lines, JSON) becomes the folder of a study, and its report is that
of any study.

Rows are runs: their arm, their seed, and what they scored. The tables that Weights & Biases, MLflow and trackio export
are read as they are; what another tool calls the columns can be said.
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
# columns of run names, and such names as hold both: plain-3, plain_seed3, "DropHead(p=0.1), seed 3"
RUN_NAMES = ("run_name", "run", "name", "mlflow.runname")
NAMED = re.compile(r"(.*?[^\s,_/|:=-])(?:[\s,_/|:=-]+(?:seed|s)?|seed)[\s,_/|:=-]*(\d+)", re.IGNORECASE)
# by which exports tell settings from figures
SETTINGS = ("params.", "config.", "config/")
FIGURES = ("metrics.", "summary.", "summary/")
FAILED = ("failed", "crashed", "killed", "running", "scheduled", "unfinished", "damaged")
# what tells one run from another, and is no setting of it
TIMES = ("created", "updated", "start time", "start_time", "end_time", "duration", "runtime", "_runtime", "timestamp")
NOTES = ("notes", "user", "tags", "source name", "source type", "artifact_uri", "experiment_id", "diverged_at_step")
MACHINES = (
    "hostname",
    "host",
    "sweep",
    "agent",
    "description",
    "job type",
    "github",
    "gpu type",
    "gpu count",
    "cpu count",
    "os",
    "python version",
    "commit",
)
MORE_TIMES = ("end time", "relative time", "heartbeatat")
# columns that hold a whole dict, as Weights & Biases' own recipe for an export and trackio's query write them
DICTS = ("config", "summary", "metrics")
# with which the CSV of Weights & Biases' page begins; its settings and then its figures follow, each by the alphabet
OF_WANDB = ("name", "state", "created", "runtime")
OF_THE_RUN = (*RUNS, *STATES, *STEPS, *SEEDS, *TIMES, *MORE_TIMES, *NOTES, *MACHINES, "_timestamp")
# how many of a kind of fault are told by row
TOLD = 5
TAB = "\t"
# as spreadsheets write numbers in countries where fields are parted by semicolons
DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+(e[+-]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Row:
    """Hold one run of a table; `line` counts as an editor does, the heading being line 1."""

    line: int
    values: dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """Hold a run as it was found: its row, its arm, its seed and its figures by outcome."""

    row: Row
    arm: str
    seed: int
    figures: dict[str, float | None]
    diverged: bool


def is_table(path: Path) -> bool:
    """Return whether a path is a table of numbers and no folder."""
    return path.is_file() or path.suffix.lower() in SUFFIXES


def study_of_numbers(
    path: Path, outcomes: Sequence[str], baseline: str, out: Path, *, arm: str = "", seed: str = ""
) -> list[str]:
    """Write the folder of a study from a table, and give what should be known of it, by row.

    Args:
        path: the table.
        outcomes: as `--outcome`, the deciding one first: "accuracy:higher".
        baseline: the arm that the others are held against.
        out: the folder.
        arm: the column of the arms; "" finds it.
        seed: the column of the seeds; "" finds it.

    Raises:
        StudyError: naming the rows, where a column is missing, a row has no arm or seed, two rows are of one arm and
            seed, or rows of one arm have different settings.
    """
    # imports torch, which the report of a study does without
    from headwise.experiments.script import read_outcome

    metrics = [read_outcome(text) for text in outcomes]
    if not metrics:
        raise StudyError(
            f"{path}: say what is compared: --outcome NAME:higher or NAME:lower, such as --outcome accuracy:higher."
        )
    rows, of_names = _named_by_run(read_rows(path), bool(arm or seed))
    rows = _last_of_each_run(rows, arm, seed)
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    columns = {
        "arm": _column(names, arm, ARMS, "--arm", path),
        "seed": _column(names, seed, SEEDS, "--seed-column", path),
    }
    wanted = {metric.name: _figure_column(names, metric.name, path) for metric in metrics}
    cells = _cells(path, rows, columns, wanted)
    arms = list(dict.fromkeys(cell.arm for cell in cells))
    if baseline not in arms:
        raise StudyError(
            f"{path} has no arm {baseline!r}.{suggest(baseline, arms)} Arms: {', '.join(arms)}. Name one: "
            f"--baseline {arms[0]!r}."
        )
    _refuse_doubles(path, cells)
    _refuse_mixed(path, cells, {*columns.values(), *wanted.values(), *_figures_of_wandb(names)})
    notes = of_names + _gaps(cells, [baseline, *(label for label in arms if label != baseline)], metrics[0].name)
    _write(path, cells, metrics, baseline, out, notes)
    return notes


def read_rows(path: Path) -> list[Row]:
    """Read a table: CSV or TSV with a heading, or JSON objects, one a line or in a list; their parts are named with
    dots.

    Raises:
        StudyError: where the file is missing, empty, or a line is no row.
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
        raise StudyError(f"{path} holds no row. Give a table with a heading and one row a run.")
    return rows


def _of_json(path: Path, text: str) -> Iterable[Row]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise StudyError(
                f"{path}, line {number}, is no JSON: {why[0].lower()}{why[1:]}. Write the line whole, or delete it "
                "where its writer was cut."
            ) from error
        if not isinstance(found, dict):
            raise StudyError(f'{path}, line {number}, is no object. Give one run a line: {{"arm": ..., "seed": ...}}.')
        yield Row(number, _unfolded(path, number, _flat(found)))


def _of_whole_json(path: Path, text: str) -> Iterable[Row]:
    """Read a list of runs, or what `trackio query --json` prints, whose "rows" are one."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise StudyError(f"{path} is no JSON: {error}. Give a list of runs, or one a line in a .jsonl file.") from error
    rows = found.get("rows") if isinstance(found, dict) else found
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise StudyError(f'{path} holds no list of runs. Write [{{"arm": ..., "seed": ...}}, ...].')
    for number, row in enumerate(rows, 1):
        yield Row(number, _unfolded(path, number, _flat(row)))


def _flat(found: dict[str, Any], before: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in found.items():
        values |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
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
            twice = [name for name, count in Counter(names).items() if count > 1 and name]
            if twice:
                raise StudyError(f"{path} has two columns {twice[0]!r}. Rename one.")
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
    """Take apart the cells that hold a dict, as Python writes it or as JSON."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name.lower() not in DICTS or not isinstance(value, str) or not value.startswith("{"):
            found[name] = value
            continue
        try:
            # Python writes a figure that is none as nan, which it does not read again
            content = ast.literal_eval(re.sub(r"(?<=: )-?(nan|inf)(?=[,}])", "None", value))
        except (ValueError, SyntaxError):
            try:
                content = json.loads(value)
            except ValueError as error:
                raise StudyError(
                    f"{path}, row {line}: {name} is no dict that can be read. Export its entries as columns."
                ) from error
        found |= _flat(content, f"{name.lower()}.")
    return found


def _named_by_run(rows: list[Row], told: bool) -> tuple[list[Row], list[str]]:
    """Take arm and seed out of the runs' names where no column holds them, as in the CSV of a plot of trackio's
    dashboard, and say so."""
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    known = {_plain(name): name for name in reversed(names)}
    column = next((known[name] for name in RUN_NAMES if name in known), None)
    if told or column is None or known.keys() & {*ARMS, *SEEDS}:
        return rows, []
    parts = [NAMED.fullmatch(str(row.values.get(column, "")).strip()) for row in rows]
    whole = [part for part in parts if part is not None]
    if len(whole) < len(rows):
        return rows, []
    arm, seed = whole[0].groups()
    note = f"arms and seeds are taken from the names in {column}: {whole[0].group()} is {arm}, seed {int(seed)}."
    return [
        Row(row.line, row.values | {"arm": part.group(1), "seed": int(part.group(2))}) for row, part in zip(rows, whole)
    ], [note]


def _last_of_each_run(rows: list[Row], arm: str, seed: str) -> list[Row]:
    """Return the last row of each run where a table holds the course of runs, as trackio's does."""
    names = {name.lower(): name for row in rows for name in row.values}
    step, run = (next((names[name] for name in wanted if name in names), None) for wanted in (STEPS, RUNS))
    if step is None or run is None:
        return rows
    # a name that two arms or seeds share, such as a number within each, is of two runs
    parts = [name for name in names.values() if name in (arm, seed) or _plain(name) in (*ARMS, *SEEDS)]
    parts = [name for name in parts if all(row.values.get(name) not in ("", None) for row in rows)]
    found: dict[tuple[str, ...], Row] = {}
    for row in sorted(rows, key=lambda row: _float(row.values.get(step)) or 0.0):
        key = tuple(str(row.values.get(name)) for name in (run, *parts))
        before = found.get(key)
        # a row of a course holds what was logged then: what was logged before stands
        kept = {name: value for name, value in before.values.items() if value not in ("", None)} if before else {}
        found[key] = Row(row.line, kept | {n: v for n, v in row.values.items() if v not in ("", None)})
    return sorted(found.values(), key=lambda row: row.line)


def _column(names: list[str], asked: str, known: Sequence[str], option: str, path: Path) -> str:
    if asked:
        if asked not in names:
            raise StudyError(
                f"{option} {asked!r}: {path} has no such column.{suggest(asked, names)} Columns: {', '.join(names)}."
            )
        return asked
    plain = {_plain(name): name for name in reversed(names)}
    found = next((plain[name] for name in known if name in plain), None)
    if found is None:
        raise StudyError(
            f"{path} has no column {known[0]}. Columns: {', '.join(names)}. Say which one it is: {option} NAME."
        )
    return found


def _figure_column(names: list[str], name: str, path: Path) -> str:
    for candidate in (
        name,
        f"test/{name}",
        *(f"{before}{name}" for before in FIGURES),
        *(f"{before}test/{name}" for before in FIGURES),
    ):
        if candidate in names:
            return candidate
    raise StudyError(f"--outcome {name}: {path} has no such column.{suggest(name, names)} Columns: {', '.join(names)}.")


def _figures_of_wandb(names: list[str]) -> list[str]:
    """Name the figures in the CSV of Weights & Biases' page: behind its settings the alphabet begins once more."""
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


def _cells(path: Path, rows: list[Row], columns: dict[str, str], wanted: dict[str, str]) -> list[Cell]:
    cells, wrong = [], []
    for row in rows:
        arm, seed = str(row.values.get(columns["arm"], "")).strip(), _float(row.values.get(columns["seed"]))
        if not arm:
            wrong.append(f"row {row.line} has no {columns['arm']}")
        elif seed is None or seed != int(seed):
            wrong.append(
                f"row {row.line} has {row.values.get(columns['seed'])!r} for {columns['seed']}, which is no whole "
                "number"
            )
        else:
            state = _state(row)
            failed = any(word in state for word in FAILED) or "diverged" in state
            figures = {name: None if failed else _float(row.values.get(column)) for name, column in wanted.items()}
            for name, column in wanted.items():
                given = row.values.get(column)
                if _float(given) is None and str(given or "").strip().lower() not in (
                    "",
                    "nan",
                    "none",
                    "null",
                    "inf",
                    "-inf",
                    "infinity",
                ):
                    wrong.append(f"row {row.line} has {given!r} for {name}, which is no number")
            cells.append(Cell(row, arm, int(seed), figures, "diverged" in state))
    _refuse(path, wrong, "Repair the rows.")
    return cells


def _state(row: Row) -> str:
    return next((str(value).lower() for name, value in row.values.items() if name.lower() in STATES), "")


def _refuse_doubles(path: Path, cells: list[Cell]) -> None:
    by_cell: dict[tuple[str, int], list[int]] = defaultdict(list)
    for cell in cells:
        by_cell[cell.arm, cell.seed].append(cell.row.line)
    wrong = [
        f"rows {' and '.join(map(str, lines))} are both {arm}, seed {seed}"
        for (arm, seed), lines in by_cell.items()
        if len(lines) > 1
    ]
    _refuse(path, wrong, "A pair needs one run of each arm: leave the others out.")


def _refuse_mixed(path: Path, cells: list[Cell], used: set[str]) -> None:
    """Refuse rows of one arm with other settings: those that an export names so, else one that stands out."""
    wrong = []
    names = dict.fromkeys(name for cell in cells for name in cell.row.values)
    for name in (
        name
        for name in names
        if name not in used
        and _plain(name) not in OF_THE_RUN
        and not name.startswith((*FIGURES, "tags."))
        # what trackers note of a run for themselves
        and not _plain(name).startswith("_")
    ):
        for arm in dict.fromkeys(cell.arm for cell in cells):
            own = [cell for cell in cells if cell.arm == arm]
            counts = Counter(str(cell.row.values.get(name, "")) for cell in own)
            (usual, many), *others = counts.most_common()
            known = name.startswith(SETTINGS)
            # figures differ in every row, and so do names and times
            if not others or not (known or (many > 1 and len(own) - many <= len(own) // 2)):
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
        "One arm is one configuration: give them different arms, or leave the column out where it is no setting.",
    )


def _gaps(cells: list[Cell], arms: list[str], outcome: str) -> list[str]:
    known = {(cell.arm, cell.seed): cell for cell in cells}
    notes = []
    for arm in arms:
        for seed in sorted({cell.seed for cell in cells}):
            cell = known.get((arm, seed))
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
        more = f"; and {len(wrong) - TOLD} more" if len(wrong) > TOLD else ""
        raise StudyError(f"{path}: {'; '.join(wrong[:TOLD])}{more}. {remedy}")


def _float(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _write(path: Path, cells: list[Cell], metrics: list[Metric], baseline: str, out: Path, notes: list[str]) -> None:
    """Write the study of a table in the formats of every study: what it had before from the same file is replaced."""
    known = out / "study.json"
    if known.is_file() and json.loads(known.read_text(encoding="utf-8")).get("kind") != "numbers":
        raise StudyError(f"{out} holds a study of its own. Choose another --out.")
    # of an earlier state of the table
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
    write_json(known, record.model_dump(mode="json"))
