"""The columns of a table of runs: arm, seed, outcomes and settings, steps, and how a run ended.

Weights & Biases, MLflow, trackio, Optuna and Ray put a prefix before the names of settings and figures. No other column
is taken for a setting, unless the user declares it: outcomes, costs and counts repeat in an arm too. Of the states of
trackers, tuners and schedulers, only a word that is known to mean success is believed. Every other state leaves a run
without figures.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from headwise_verdict.files.errors import StudyError, suggest
from headwise_verdict.reporting.table_rows import Row, figure_of, names_of

ARMS = ("arm", "method", "group")
SEEDS = ("seed", "random_seed", "data_seed", "run_seed")
STEPS = ("step", "_step", "global_step")
RUNS = ("run_id", "run id", "run", "run_name", "id", "name")
SETTINGS = ("params.", "config.", "config/", "params_")
FIGURES = ("metrics.", "summary.", "summary/")
# what trackers add for their own use
OF_TRACKERS = ("tags.", "user_attrs_", "system_attrs_", "_")
# entries of a configuration that differ between runs of one arm: their numbers, names and folders
OF_EACH_RUN = re.compile(rf"{'|'.join((*RUNS, *SEEDS))}|_.*|.*dir|.*_id|.*_rank|hostname|device|resume_from_checkpoint")


def plain(name: str) -> str:
    """Return a column's name in lower case, without the prefix of a tool's settings."""
    lower = name.lower()
    return next((lower.removeprefix(before) for before in SETTINGS if lower.startswith(before)), lower)


def column_of(
    names: Sequence[str], requested: str, usual: Sequence[str], option: str, path: Path, otherwise: str = ""
) -> str:
    """Return the column of the arms or seeds: the requested one, else the first of the usual names.

    `otherwise` says what can be done but naming a column.

    Raises:
        StudyError: if there is no such column.
    """
    if requested:
        return _found(f"{option} {requested!r}", requested, [requested], names, path)
    by_plain_name = {plain(name): name for name in reversed(names)}
    match = next((by_plain_name[name] for name in usual if name in by_plain_name), None)
    if match is None:
        raise StudyError(
            f"{path} has no column {usual[0]!r}. Name it by {option}{otherwise}. Columns: {', '.join(names)}."
        )
    return match


def figure_column(names: Sequence[str], name: str, path: Path) -> str:
    """Return the column of an outcome: its name, alone or with the prefixes of headwise and of tools.

    Raises:
        StudyError: if there is no such column.
    """
    own = (name, f"test/{name}")
    return _found(f"--outcome {name}", name, [*own, *(f"{b}{one}" for one in own for b in FIGURES)], names, path)


def declared_settings(names: Sequence[str], declared: Iterable[str], path: Path) -> list[str]:
    """Return the columns of the settings that the user declared, with or without a tool's prefix.

    Raises:
        StudyError: if there is no such column.
    """
    return [
        _found(f"--settings {name}", name, [f"{before}{name}" for before in ("", *SETTINGS)], names, path)
        for name in declared
    ]


def _found(what: str, name: str, candidates: Iterable[str], names: Sequence[str], path: Path) -> str:
    match = next((one for one in candidates if one in names), None)
    if match is None:
        near = suggest(name, list(names))
        raise StudyError(f"{what}: {path} has no such column.{near} Columns: {', '.join(names)}.")
    return match


def settings_of_format(names: Sequence[str]) -> list[str]:
    """Return the columns that an export marks as settings of an arm; none if it marks none."""
    return [n for n in names if n.lower().startswith(SETTINGS) and not OF_EACH_RUN.fullmatch(plain(n))]


def unasked_columns(names: Sequence[str], used: Iterable[str]) -> list[str]:
    """Return the columns that may or may not be settings, in a table that marks none."""
    known = {*used, *STEPS, "timestamp", ""}
    # names with a slash are figures, as in headwise's own runs.csv
    others = [name for name in names if name not in known and "/" not in name]
    others = [name for name in others if not name.lower().startswith((*FIGURES, *OF_TRACKERS))]
    return [name for name in others if not OF_EACH_RUN.fullmatch(plain(name))]


# columns that describe a run's settings or figures, whatever their last word is
NOT_STATES = ("params.", "params_", "config.", "config/", "user_attrs_", "metrics.", "summary.", "summary/")
STATE_COLUMN = re.compile(
    r"(?:.*[./])?(?:(?:run|trial|job|task|pod|experiment)[ _-]?)?(?:status|state)|(?:.*[./])?status[./]phase",
    re.IGNORECASE,
)
# columns of true and false whose name is a state, as Neptune's `sys/failed`; `done` is false in Ray's finished trials
FLAG_COLUMN = re.compile(
    r"(?:.*[./])?(?:is_)?(finished|completed?|failed|crashed|killed|pruned|interrupted|diverged)", re.IGNORECASE
)
EXIT_COLUMN = re.compile(r"(?:.*[./])?(?:exit|return)[ _-]?code", re.IGNORECASE)
# letters only: the words of W&B, MLflow, Optuna, Lightning, Slurm, Kubernetes and others
FINISHED = "finished complete completed succeeded success successful done passed published cd".split()


@dataclass(frozen=True)
class RunState:
    """What a row says of its run; `text` is the table's own word, "" if it says nothing."""

    kind: Literal["finished", "unfinished", "diverged"] = "finished"
    text: str = ""


def state_columns(names: Sequence[str], used: Collection[str]) -> list[str]:
    """Return the columns that state how a run ended; those `used` as arm, seed or outcome do not."""
    patterns = (STATE_COLUMN, FLAG_COLUMN, EXIT_COLUMN)
    others = [name for name in names if name not in used and not name.lower().startswith(NOT_STATES)]
    return [name for name in others if any(pattern.fullmatch(name) for pattern in patterns)]


def states_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[RunState]:
    """Return the state of each row, the worst of its columns.

    An empty cell says nothing, unless another row of its column is said to have finished: a run of which this is not
    said did not.
    """
    by_column = [[_state(name, row.get(name)) for row in rows] for name in columns]
    for states in by_column:
        if any(state.kind == "finished" and state.text for state in states):
            states[:] = [state if state.text else RunState("unfinished", "empty") for state in states]
    # diverged first: a tracker that calls a diverged run finished, or crashed, does not make it another run
    worst = ("finished", "unfinished", "diverged")
    return [
        max((states[at] for states in by_column), key=lambda state: worst.index(state.kind), default=RunState())
        for at in range(len(rows))
    ]


def _state(column: str, value: Any) -> RunState:
    text = "" if value is None or value != value else str(value).strip()
    if not text:
        return RunState()
    if EXIT_COLUMN.fullmatch(column):
        # Slurm writes the code and the signal: 0:0
        passed = re.fullmatch(r"0(\.0*)?(:0)?", text)
        return RunState("finished", text) if passed else RunState("unfinished", f"{column} {text}")
    flag = FLAG_COLUMN.fullmatch(column)
    if flag is None:
        return _of_word(text)
    if text.lower() == "true":
        return _of_word(flag[1])
    # else a time or a count of that name
    wanted = text.lower() == "false" and _of_word(flag[1]).kind == "finished"
    return RunState("unfinished", f"not {flag[1]}") if wanted else RunState()


def _of_word(text: str) -> RunState:
    # "TrialState.PRUNED" and "<TrialState.PRUNED: 2>" of Python, "JOB_STATE_SUCCEEDED" of Vertex
    enum = re.fullmatch(r"<?\w+\.(\w+)(?:: .+>)?", text)
    word = re.sub(r"[\s_-]", "", (enum[1] if enum else text).lower()).removeprefix("jobstate")
    # Ray calls a trial that ended by itself TERMINATED; elsewhere "terminated" is the end of a run that was stopped
    if word in FINISHED or text in ("TERMINATED", "Trial.TERMINATED"):
        return RunState("finished", text)
    return RunState("diverged" if word.startswith("diverged") else "unfinished", text)


# what tools call the evaluations whose losses tell whether a training was long enough
EVALUATIONS = {"train": "train", "training": "train", "test": "test"}
EVALUATIONS |= dict.fromkeys(("eval", "val", "valid", "validation"), "validation")
LOSS = re.compile(rf"(?:({'|'.join(EVALUATIONS)})[/_.])?loss")


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
    losses: dict[tuple[str, ...], list[tuple[int, str, float]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: figure_of(row.values.get(step)) or 0.0):
        key = tuple(str(row.values.get(name)) for name in (run, *parts))
        earlier = last_rows.get(key, Row(row.line, {}))
        logged = {name: value for name, value in row.values.items() if value not in ("", None)}
        losses[key] += _losses(logged, figure_of(row.values.get(step)))
        # a row contains only what was logged at its step, so earlier values remain valid
        last_rows[key] = replace(row, values=earlier.values | logged)
    whole = [replace(row, losses=tuple(losses[key])) for key, row in last_rows.items()]
    return sorted(whole, key=lambda row: row.line)


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
