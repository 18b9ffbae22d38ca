"""The runs of a candidate and a baseline, read from a table: pairs by seed, and what cannot be paired."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headwise_verdict.files.errors import StudyError
from headwise_verdict.judging.curves import Target
from headwise_verdict.reporting.table_columns import ARMS, SEEDS, RunState, column_of, plain, state_columns, states_of
from headwise_verdict.reporting.table_rows import Row, figure_of, is_missing, names_of, read_rows, seed_of

# figures beyond this are those of runs that diverged
LARGEST = 1e100
# seeds that a message lists
SHOWN = 6
# states of runs whose figures count
ENDED = ("finished", "diverged")


@dataclass(frozen=True)
class Pairs:
    """Runs of two arms.

    Attributes:
        candidate, baseline: the metric by seed, in the order in which the candidate's runs appear.
        notes: runs that have no partner, and figures that look copied.
    """

    candidate: dict[str, float]
    baseline: dict[str, float]
    notes: tuple[str, ...]

    def differences(self) -> list[float]:
        """Return candidate minus baseline for each seed that both have, in the order of the candidate's runs."""
        return [value - self.baseline[seed] for seed, value in self.candidate.items() if seed in self.baseline]


def read_pairs(
    path: Path,
    metric: str,
    candidate: str,
    baseline: str,
    arm: str = "",
    seed: str = "",
    *,
    needs_both: bool = True,
    target: Target | None = None,
    diverged: tuple[float, bool] | None = None,
    against: Path | None = None,
) -> Pairs:
    """Return the runs of two arms of a table, or of two tables with one arm each.

    Args:
        path: CSV, TSV, JSON or JSONL with one row per run.
        metric: column of the metric.
        candidate, baseline: names of the two arms.
        arm, seed: columns of the arms and seeds; "": the usual names.
        needs_both: whether the baseline must have runs.
        target: the table holds curves, and the figure of a run is the step at which it reaches the target.
        diverged: figure of a run that diverged, and whether higher figures are better; None: such a run is refused.
        against: table of the baseline's runs; `path` then has those of the candidate. None: `path` has both.

    Raises:
        StudyError: if a column or the candidate is missing, a seed appears twice in an arm, or a figure is
            not a number, or diverged runs would count as better than one that finished.
    """
    if against is None:
        both = _table(path, metric, arm, seed, target, (candidate, baseline))
        tables = {candidate: both, baseline: both}
    else:
        places = {candidate: path, baseline: against}
        tables = {name: _table(place, metric, arm, seed, target, (name,), only=name) for name, place in places.items()}
    runs: dict[str, dict[str, float]] = {}
    notes: list[str] = []
    finished: dict[str, dict[str, float]] = {}
    for name, table in tables.items():
        own = table.of(name)
        if not own and (name == candidate or needs_both):
            raise StudyError(f"{table.path} has no run of {name!r}. Its arms: {', '.join(table.arms())}.")
        ended = [(row, state) for row, state in own if state.kind in ENDED]
        notes += [_left_out(name, row, state, table.seed) for row, state in own if state.kind not in ENDED]
        runs[name], lost = _of_arm(table.path, ended, metric, table.seed, None if diverged is None else diverged[0])
        finished[name] = {seed: value for seed, value in runs[name].items() if seed not in lost}
        if lost and diverged is not None:
            notes.append(f"diverged, and counted as {diverged[0]:g}: {name} with seed {_listed(lost)}")
    if diverged is not None:
        check_diverged(diverged[0], [x for own in finished.values() for x in own.values()], higher=diverged[1])
    notes += [*_alone(runs, candidate, baseline), *_copies(finished, candidate, baseline)]
    return Pairs(runs[candidate], runs[baseline], tuple(notes))


@dataclass(frozen=True)
class _Table:
    """The rows of a table with their states, and its columns of arms and seeds."""

    path: Path
    rows: list[Row]
    states: list[RunState]
    arm: str
    seed: str

    def of(self, name: str) -> list[tuple[Row, RunState]]:
        """Return the rows of an arm."""
        return [(row, state) for row, state in zip(self.rows, self.states) if str(row.values.get(self.arm)) == name]

    def arms(self) -> list[str]:
        """Return the names of its arms."""
        return list(dict.fromkeys(str(row.values.get(self.arm)) for row in self.rows))


def _table(
    path: Path, metric: str, arm: str, seed: str, target: Target | None, arms: tuple[str, ...], *, only: str = ""
) -> _Table:
    """Return the table at a path; only: all its rows are runs of this arm, whatever the arm is called there."""
    rows = read_rows(path)
    names = names_of(rows)
    if metric not in names:
        raise StudyError(f"{path} has no column {metric!r}. Columns: {', '.join(names)}.")
    if only and not arm:
        arm = next((name for name in names if plain(name) in ARMS), ARMS[0])
        found = list(dict.fromkeys(str(row.values[arm]) for row in rows if arm in row.values))
        if len(found) > 1:
            raise StudyError(
                f"{path} has runs of {', '.join(found[:SHOWN])} in the column {arm!r}, and --against takes a table for "
                "each arm. Leave it out and name two arms of one table, or give tables with one arm each."
            )
        rows = [replace(row, values=row.values | {arm: only}) for row in rows]
        names = names_of(rows)
    apart = ", or give the baseline's runs in a separate table by --against"
    arm = column_of(names, arm, ARMS, "--arm", path, apart)
    seed = column_of(names, seed, SEEDS, "--seed-column", path)
    if target is not None:
        rows = target.steps_of(path, rows, metric, (arm, seed), arms)
    states = states_of([row.values for row in rows], state_columns(names, (arm, seed, metric)))
    return _Table(path, rows, states, arm, seed)


def _left_out(name: str, row: Row, state: RunState, seed_column: str) -> str:
    return f"not finished, and not counted: {name} with seed {row.values.get(seed_column)}, whose state is {state.text}"


def check_diverged(figure: float | None, finished: Sequence[float], *, higher: bool) -> None:
    """Raise StudyError if the figure of diverged runs is none, or better than that of a run that finished."""
    if figure is not None and not abs(figure) <= LARGEST:
        raise StudyError(f"--diverged {figure:g} is no figure. Pass the metric of a model that has learned nothing.")
    worst = (min if higher else max)(finished, default=None)
    if figure is not None and worst is not None and (figure > worst if higher else figure < worst):
        raise StudyError(
            f"--diverged {figure:g} is better than {worst:g}, the figure of a run that finished: diverging would pay. "
            "Pass the metric of a model that has learned nothing."
        )


def _of_arm(
    path: Path, rows: list[tuple[Row, RunState]], metric: str, seed_column: str, of_diverged: float | None
) -> tuple[dict[str, float], list[str]]:
    """Return the figures of an arm by seed, and the seeds whose runs diverged."""
    runs: dict[str, float] = {}
    lost: list[str] = []
    for row, state in rows:
        seed, written = _seed(row.values.get(seed_column)), row.values.get(metric)
        if not seed:
            raise StudyError(f"{path}, line {row.line}, has no seed. Give each run one.")
        if seed in runs:
            raise StudyError(
                f"{path}, line {row.line}: seed {seed} appears twice in one arm. A run counts once: keep the one "
                "that was run first."
            )
        figure = figure_of(written)
        if figure is None and not _is_no_figure(written):
            raise StudyError(f"{path}, line {row.line}: {metric} is {written!r}, which is not a number.")
        if figure is None or abs(figure) > LARGEST or state.kind == "diverged":
            if of_diverged is not None:
                runs[seed] = of_diverged
                lost.append(seed)
                continue
            what = (
                f"the state is {state.text}"
                if state.kind == "diverged"
                else f"{metric} is {'empty' if written in (None, '') else written}"
            )
            raise StudyError(
                f"{path}, line {row.line}: {what}. A run that diverged has no figure: pass --diverged with the "
                "metric of a model that has learned nothing, or judge the share of runs that diverge."
            )
        runs[seed] = figure
    return runs, lost


def _seed(written: Any) -> str:
    """Return a seed as text, the same for 3 and for 3.0, as pandas writes it; any other text as it is."""
    number = seed_of(written)
    return str(number) if number is not None else "" if written is None else str(written).strip()


def _is_no_figure(written: Any) -> bool:
    return is_missing(written) or (isinstance(written, float) and not math.isfinite(written))


def _alone(runs: dict[str, dict[str, float]], candidate: str, baseline: str) -> Iterator[str]:
    """Yield notes on runs without a partner, and on seeds that are missing."""
    mine, other = runs[candidate], runs[baseline]
    if other:
        for name, own, theirs in ((candidate, mine, other), (baseline, other, mine)):
            alone = [seed for seed in own if seed not in theirs]
            if alone:
                yield f"without a partner, and not counted: {name} with seed {_listed(alone)}"
    yield from _gaps(candidate, mine)


def _copies(finished: dict[str, dict[str, float]], candidate: str, baseline: str) -> Iterator[str]:
    """Yield notes on figures of finished runs that look copied."""
    mine, other = finished[candidate], finished[baseline]
    same = [seed for seed in mine if mine[seed] == other.get(seed)]
    if candidate != baseline and len(same) > 1:
        yield f"{candidate} and {baseline} have the same figures with seeds {_listed(same)}: does the change act?"
    for name, own in finished.items():
        known: dict[float, list[str]] = {}
        for seed, value in own.items():
            known.setdefault(value, []).append(seed)
        for value, seeds in known.items():
            if len(seeds) > 1 and value != round(value, 3):
                yield f"{name} has the same figure {value:.10g} with seeds {_listed(seeds)}: are these copies of a run?"


def _gaps(candidate: str, runs: Iterable[str]) -> Iterator[str]:
    """Yield the note that seeds are missing between the first and the last, where most of them were run."""
    seeds = {number for seed in runs if (number := seed_of(seed)) is not None}
    if not seeds or max(seeds) - min(seeds) >= 2 * len(seeds):
        return
    missing = [str(seed) for seed in range(min(seeds), max(seeds)) if seed not in seeds]
    if missing:
        yield f"{candidate} has no run with seed {_listed(missing)}: all seeds that were run belong in the table"


def _listed(seeds: list[str]) -> str:
    return ", ".join(seeds[:SHOWN]) + (f" and {len(seeds) - SHOWN} more" if len(seeds) > SHOWN else "")
