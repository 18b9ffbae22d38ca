"""Steps to a target: from the curves of runs, one row for each run with the step at which it reaches a value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from headwise_verdict.files.errors import StudyError
from headwise_verdict.reporting.table_rows import Row, figure_of

STEPS = ("step", "steps", "_step", "iteration", "tokens")


@dataclass(frozen=True)
class Target:
    """A value of the metric that runs shall reach; what is judged is how soon."""

    value: float
    higher: bool
    # column of the steps; "": a usual name
    step: str = ""

    def reached(self, curve: list[tuple[float, float]]) -> float | None:
        """Return the step at which a curve of (step, value) first reaches the target, by linear interpolation."""
        sign = 1 if self.higher else -1
        if curve and sign * (curve[0][1] - self.value) >= 0:
            return curve[0][0]
        for (before, low), (after, high) in pairwise(curve):
            if sign * (high - self.value) >= 0:
                return before + (after - before) * (self.value - low) / (high - low)
        return None

    def steps_of(
        self, path: Path, rows: list[Row], metric: str, columns: tuple[str, str], arms: tuple[str, ...]
    ) -> list[Row]:
        """Return one row for each run of these arms, whose metric is the step at which it reached the target.

        Raises:
            StudyError: if there is no column of steps, a cell is not a number, or a run never reaches the target.
        """
        names = list(dict.fromkeys(name for row in rows for name in row.values))
        step = self.step or next((name for name in STEPS if name in names), "")
        if step not in names:
            raise StudyError(f"{path} has no column {step or 'step'!r}. Name it: --step. Columns: {', '.join(names)}.")
        runs: dict[tuple[str, ...], list[Row]] = {}
        for row in rows:
            run = tuple(str(row.values.get(name)) for name in columns)
            if run[0] in arms and row.values.get(metric) not in (None, ""):
                runs.setdefault(run, []).append(row)
        found, never = [], []
        for (arm, seed), own in runs.items():
            curve = sorted((_number(path, row, step), _number(path, row, metric)) for row in own)
            if any(before == after for (before, _), (after, _) in pairwise(curve)):
                raise StudyError(f"{path}: {arm} with seed {seed} has a step twice. A run has one curve.")
            at = self.reached(curve)
            never += [f"{arm} with seed {seed}"] if at is None else []
            found.append(Row(own[-1].line, own[-1].values | {metric: at}))
        if never:
            raise StudyError(
                f"{', '.join(never)}: {metric} {self.value:g} is never reached: there are no steps to compare. Leaving "
                "such runs out would favour their arm. Train all runs longer, choose a target that all reach, or judge "
                f"the last {metric} without --target."
            )
        return found


def _number(path: Path, row: Row, name: str) -> float:
    figure = figure_of(row.values.get(name))
    if figure is None or not math.isfinite(figure):
        raise StudyError(f"{path}, line {row.line}: {name} is {row.values.get(name)!r}, which is not a number.")
    return figure
