"""The command `headwise alarms`: the rules of `watch` on a log that exists already."""

from __future__ import annotations

import fnmatch
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict

from headwise.files.arguments import is_a, is_path
from headwise.files.durable import finite
from headwise.files.errors import suggest
from headwise.files.optional_imports import load
from headwise.health.watching.logged import GRADIENT, JUDGED, LOSS, OWN, LoggedRun, judged
from headwise.health.watching.rules import Thresholds
from headwise_verdict import Row, StudyError, figure_of, is_missing, read_rows

# increased when a field of the JSON changes its meaning or goes
SCHEMA = "headwise.alarms/1"
# the exit code if a rule raised an alert; 1 and 2 are errors
ALERTED = 3
STEPS = ("step", "_step", "global_step", "steps", "iteration", "iter", "trainer/global_step", "train/global_step")
RUNS = ("run", "run_id", "run_name")
USUAL = {
    LOSS: ("loss", "train/loss", "train_loss", "training_loss", "loss/train", "train/train_loss", "lm_loss", "lm loss"),
    GRADIENT: ("grad_norm", "train/grad_norm", "gradient_norm", "grad-norm", "train/gradient_norm", "grad/norm"),
}
EVENTS = "events.out.tfevents"
# in the CSV of a chart of Weights & Biases, the run stands before the column, and bounds behind it
OF_CHART, BOUNDS = " - ", ("__MIN", "__MAX")
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "infinity": math.inf, "-inf": -math.inf, "-infinity": -math.inf}


class AlarmsContent(TypedDict):
    """What `headwise alarms --json` prints; alarms.schema.json is its JSON Schema.

    A number that is not finite is null.
    """

    schema: Literal["headwise.alarms/1"]
    source: str
    # the exit code: 0 no alert, 3 an alert
    code: int
    notes: list[str]
    runs: list[LoggedRun]


@dataclass(frozen=True)
class LogAlarms:
    """What `headwise.alarms` returns: print it.

    Attributes:
        source: the log.
        runs: what the rules say of each run.
        notes: what of the log was not read, and why.
    """

    source: str
    runs: tuple[LoggedRun, ...]
    notes: tuple[str, ...] = ()

    @property
    def code(self) -> int:
        """Return the exit code of the command: 3 if there is an alert, else 0."""
        return ALERTED if any(run.alerts for run in self.runs) else 0

    def to_json(self) -> str:
        """Return one JSON object; a number that is not finite is null."""
        content = {"schema": SCHEMA, "source": self.source, "code": self.code, "notes": list(self.notes)}
        return json.dumps(finite(content | {"runs": [asdict(run) for run in self.runs]}), allow_nan=False)

    def __str__(self) -> str:
        return "\n\n".join([*map(str, self.runs), *(f"note: {note}" for note in self.notes)])


def alarms(
    source: str | os.PathLike[str],
    names: Mapping[str, str] | None = None,
    *,
    step: str = "",
    run: str = "",
    thresholds: Thresholds | None = None,
) -> LogAlarms:
    """Return what the rules of `headwise.watch` say of a log that exists already.

    Args:
        source: CSV or TSV with a heading, JSON lines, a JSON list of rows, a Trainer's `trainer_state.json`, a health
            log of `headwise.JsonLines`, a TensorBoard event file or a folder of them.
        names: the column of each figure, such as {"loss": "train/loss", "max_logit": "layer*/max_logit"}; `*` matches
            several columns. Usual names are found without it.
        step: the column of the steps; "": a usual name, else rows are counted.
        run: the column of the runs; "": a usual name, else there is one run.
        thresholds: the limits of the rules.

    Raises:
        StudyError: if the log cannot be read, or has no column of a name.
        ImportError: if event files are read without tensorboard.

    Example:
        >>> import os, tempfile, headwise
        >>> losses = [2 + 0.01 * (step % 3) for step in range(60)] + [9.0]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "log.csv")
        ...     with open(path, "w") as file:
        ...         _ = file.write("step,loss\\n" + "".join(f"{s},{x}\\n" for s, x in enumerate(losses)))
        ...     found = headwise.alarms(path)
        >>> found.code, found.runs[0].alerts[0]["alert"], found.runs[0].alerts[0]["step"]
        (3, 'loss_spike', 60)
    """
    is_path("source", source)
    is_a("names", names, (Mapping, type(None)), "a mapping of figures to columns, or None")
    is_a("step", step, str, "the name of a column")
    is_a("run", run, str, "the name of a column")
    is_a("thresholds", thresholds, (Thresholds, type(None)), "headwise.Thresholds(...) or None")
    path, notes = Path(source), list[str]()
    for name in names or {}:
        if name not in JUDGED:
            near = suggest(name, list(JUDGED))
            raise StudyError(f"--map {name}: no rule reads it.{near} Rules read: {', '.join(JUDGED)}.")
    of_tensorboard = path.is_dir() or path.name.startswith(EVENTS)
    tables = dict(_event_files(path)) if of_tensorboard else _by_run(path, _rows(path), step, run)
    if of_tensorboard and not tables:
        raise StudyError(f"{path}: its event files hold no scalars. Give a folder of a training that logged some.")
    columns = list(dict.fromkeys(name for table in tables.values() for name in table))
    chosen = _columns(path, columns, names or {})
    runs = []
    for name, table in tables.items():
        figures: dict[str, dict[str, list[tuple[int, float]]]] = {}
        for column, statistic in chosen.items():
            if points := table.get(column):
                kept, dropped = _resumed(points)
                figures.setdefault(statistic, {})[column] = kept
                if dropped:
                    notes.append(f"{column}: {dropped} values were logged again after a restart; the later ones count")
        runs.append(judged(name, figures, thresholds))
    if not any(run_.rules and any(rule.columns for rule in run_.rules) for run_ in runs):
        raise StudyError(
            f"{path}: no rule can be applied. Name the columns: --map loss=COLUMN. Columns: {', '.join(columns[:30])}."
        )
    return LogAlarms(str(path), tuple(runs), tuple(dict.fromkeys(notes)))


def command(path: Path, mapped: Iterable[str], step: str, run: str, *, as_json: bool) -> None:
    """Print what the rules say, as text or JSON, and exit with 3 if there is an alert."""
    names = {}
    for one in mapped:
        name, mark, column = one.partition("=")
        if not mark or not column:
            raise StudyError(f"--map {one}: write NAME=COLUMN, such as --map loss=train/loss.")
        names[name] = column
    found = alarms(path, names, step=step, run=run)
    print(found.to_json() if as_json else found)
    if found.code:
        sys.exit(found.code)


# Readers: for each run, the points of each column

Points = list[tuple[int, float]]
Table = dict[str, Points]


def _rows(path: Path) -> list[Row]:
    """Return the rows of a table; of a Trainer's state, those of its history."""
    if path.suffix.lower() != ".json":
        return read_rows(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # read again for its message
        return read_rows(path)
    history = content.get("log_history") if isinstance(content, dict) else None
    if not isinstance(history, list):
        return read_rows(path)
    return [Row(number, row) for number, row in enumerate(history, 1) if isinstance(row, dict)]


def _by_run(path: Path, rows: list[Row], step: str, run: str) -> dict[str, Table]:
    """Return the points of each column of each run."""
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    for option, given in (("step", step), ("run", run)):
        if given and given not in names:
            raise StudyError(f"--{option} {given}: {path} has no such column. Columns: {', '.join(names)}.")
    lower = {name.lower(): name for name in reversed(names)}
    at = step or next((lower[name] for name in STEPS if name in lower), "")
    of = run or next((lower[name] for name in RUNS if name in lower), "")
    tables: dict[str, Table] = {}
    for number, row in enumerate(rows):
        place = _step(path, row, at, number)
        if place is None:
            continue
        name = str(row.values.get(of, "")) if of else ""
        if {"statistic", "site", "value"} <= row.values.keys():
            head = "" if row.values.get("head") is None else f"/head{row.values['head']}"
            figures = {f"health/{row.values['statistic']}/{row.values['site']}{head}": row.values["value"]}
        else:
            figures = {column: value for column, value in row.values.items() if column not in (at, of)}
        for column, value in figures.items():
            number_ = _figure(value, null=math.nan if column.startswith("health/") else None)
            if number_ is not None:
                _add(tables, name, column, place, number_)
    return tables


def _add(tables: dict[str, Table], run: str, column: str, step: int, value: float) -> None:
    # names of runs hold the mark more often than names of figures
    before, mark, own = column.rpartition(OF_CHART)
    if column.endswith(BOUNDS):
        return
    run, column = (before, own) if mark else (run, column)
    tables.setdefault(run, {}).setdefault(column, []).append((step, value))


def _step(path: Path, row: Row, column: str, number: int) -> int | None:
    """Return the step of a row: its cell, else its number; None for a row without one."""
    if not column:
        return number
    value = row.values.get(column)
    if is_missing(value):
        return None
    figure = figure_of(value)
    if figure is None:
        raise StudyError(f"{path}, line {row.line}: {column} is {value!r}, which is not a step.")
    return int(figure)


def _figure(value: Any, null: float | None = None) -> float | None:
    """Return a number, also one that is not finite; None for a cell that holds none."""
    if value is None:
        return null
    if isinstance(value, float):
        return value
    found = figure_of(value)
    return NOT_FINITE.get(str(value).strip().lower()) if found is None else found


def _event_files(path: Path) -> Iterator[tuple[str, Table]]:
    """Yield the scalars of each folder that holds event files."""
    files = [path] if path.is_file() else sorted(path.rglob(f"{EVENTS}*"))
    if not files:
        raise StudyError(f"{path} holds no TensorBoard event file. Give a table, an event file or a folder of them.")
    module = load("tensorboard.backend.event_processing.event_accumulator", "tensorboard")
    for folder in dict.fromkeys(file if path.is_file() else file.parent for file in files):
        events = module.EventAccumulator(str(folder), size_guidance={module.SCALARS: 0, module.TENSORS: 0})
        events.Reload()
        if table := _scalars(module, events):
            name = "" if folder == path else str(folder.relative_to(path))
            yield name, table


def _scalars(module: Any, events: Any) -> Table:
    tags = events.Tags()
    table = {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in tags[module.SCALARS]}
    # TensorFlow 2 and what writes like it keep a scalar as a tensor
    made = [tag for tag in tags[module.TENSORS] if events.SummaryMetadata(tag).plugin_data.plugin_name == "scalars"]
    if made:
        array = load("tensorboard.util.tensor_util", "tensorboard").make_ndarray
        table |= {tag: [(one.step, float(array(one.tensor_proto))) for one in events.Tensors(tag)] for tag in made}
    return table


def _columns(path: Path, columns: list[str], names: Mapping[str, str]) -> dict[str, str]:
    """Return the figure that each column holds, of the columns that a rule reads."""
    chosen: dict[str, str] = {}
    for name, pattern in names.items():
        matches = [column for column in columns if column == pattern] or fnmatch.filter(columns, pattern)
        if not matches:
            raise StudyError(
                f"--map {name}={pattern}: {path} has no such column.{suggest(pattern, columns)} Columns: "
                f"{', '.join(columns[:30])}."
            )
        chosen |= dict.fromkeys(matches, name)
    for name, usual in USUAL.items():
        # a nested object of JSON is read as train.loss
        match = next((one for known in usual for one in columns if one.lower().replace(".", "/") == known), None)
        if name not in names and match is not None:
            chosen[match] = name
    for column in columns:
        own = OWN.fullmatch(column)
        statistic = own["statistic"] if own else column.rpartition("/")[2]
        if statistic in JUDGED[2:] and statistic not in names:
            chosen.setdefault(column, statistic)
    return chosen


def _resumed(points: Points) -> tuple[Points, int]:
    """Return the points in the order of their steps, and the number of those that a restarted run logged again."""
    kept: Points = []
    for step, value in points:
        while kept and kept[-1][0] >= step:
            kept.pop()
        kept.append((step, value))
    return kept, len(points) - len(kept)
