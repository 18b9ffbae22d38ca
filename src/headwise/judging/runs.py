"""The runs of a candidate and a baseline, read from a table: pairs by seed, and what cannot be paired."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headwise.files.errors import StudyError
from headwise.reporting.table_rows import Row, names_of, read_rows

ARMS = ("arm", "method", "group", "config.arm", "config.method")
SEEDS = ("seed", "config.seed", "run_seed")
# seeds that a message lists
SHOWN = 6


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


def read_pairs(path: Path, metric: str, candidate: str, baseline: str, arm: str = "", seed: str = "") -> Pairs:
    """Return the runs of two arms of a table.

    Args:
        path: CSV, TSV, JSON or JSONL with one row per run.
        metric: column of the metric.
        candidate, baseline: names of the two arms.
        arm, seed: columns of the arms and seeds; "": the usual names.

    Raises:
        StudyError: if a column or the candidate is missing, a seed appears twice in an arm, or a figure is
            not a number.
    """
    rows = read_rows(path)
    names = names_of(rows)
    arm_column, seed_column = _column(path, names, arm, ARMS, "arm"), _column(path, names, seed, SEEDS, "seed-column")
    if metric not in names:
        raise StudyError(f"{path} has no column {metric!r}. Columns: {', '.join(names)}.")
    runs = {
        name: _of_arm(path, [row for row in rows if str(row.values.get(arm_column)) == name], metric, seed_column)
        for name in (candidate, baseline)
    }
    if not runs[candidate]:
        arms = dict.fromkeys(str(row.values.get(arm_column)) for row in rows)
        raise StudyError(f"{path} has no run of {candidate!r}. Its arms: {', '.join(arms)}.")
    return Pairs(runs[candidate], runs[baseline], tuple(_notes(runs, candidate, baseline)))


def _column(path: Path, names: list[str], given: str, usual: tuple[str, ...], option: str) -> str:
    if given and given not in names:
        raise StudyError(f"{path} has no column {given!r}. Columns: {', '.join(names)}.")
    found = given or next((name for name in usual if name in names), "")
    if not found:
        raise StudyError(f"{path} has no column {usual[0]!r}. Name it by --{option}. Columns: {', '.join(names)}.")
    return found


def _of_arm(path: Path, rows: list[Row], metric: str, seed_column: str) -> dict[str, float]:
    runs: dict[str, float] = {}
    for row in rows:
        seed, written = str(row.values.get(seed_column, "")).strip(), row.values.get(metric)
        if not seed:
            raise StudyError(f"{path}, line {row.line}, has no seed. Give each run one.")
        if seed in runs:
            raise StudyError(
                f"{path}, line {row.line}: seed {seed} appears twice in one arm. A run counts once: leave one out."
            )
        try:
            runs[seed] = float(written)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise StudyError(f"{path}, line {row.line}: {metric} is {written!r}, which is not a number.") from None
        if not math.isfinite(runs[seed]):
            raise StudyError(
                f"{path}, line {row.line}: {metric} is {written}. A run that diverged has no figure: write the metric "
                "of a model that has learned nothing, or judge the share of runs that diverge."
            )
    return runs


def _notes(runs: dict[str, dict[str, float]], candidate: str, baseline: str) -> Iterable[str]:
    mine, other = runs[candidate], runs[baseline]
    if other:
        for name, own, theirs in ((candidate, mine, other), (baseline, other, mine)):
            alone = [seed for seed in own if seed not in theirs]
            if alone:
                yield f"without a partner, and not counted: {name} with seed {_listed(alone)}"
    for name, own in runs.items():
        known: dict[float, list[str]] = {}
        for seed, value in own.items():
            known.setdefault(value, []).append(seed)
        for value, seeds in known.items():
            if len(seeds) > 1 and value != round(value, 3):
                yield f"{name} has the same figure {value:.10g} with seeds {_listed(seeds)}: are these copies of a run?"


def _listed(seeds: list[str]) -> str:
    return ", ".join(seeds[:SHOWN]) + (f" and {len(seeds) - SHOWN} more" if len(seeds) > SHOWN else "")
