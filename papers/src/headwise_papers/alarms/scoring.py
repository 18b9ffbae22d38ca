"""Scoring of signals: faults caught before they show in the loss, leads, and false alarms, with intervals and files."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headwise_papers.alarms.faults import HEALTHY, UNLISTED
from headwise_papers.alarms.signals import JUDGED, Series, passed, rules, signals
from headwise_verdict.results.intervals import share

# a fault shows when the loss exceeds the healthy twin's by this factor at two evaluations in a row
ABOVE = 1.1
# false alarms per healthy step at the operating point
TARGET = 1e-4
# false alarms per 1,000 steps at the points of a curve
TARGETS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)


@dataclass
class Scored:
    """One run with its signals and alerts.

    Attributes:
        shows: the step at which the loss shows the fault; None if it never does, and for healthy runs.
        series: the signals.
        rules: the steps at which shipped rules raised alerts.
    """

    family: str
    kind: str
    severity: float
    seed: int
    onset: int
    steps: int
    shows: int | None
    series: dict[str, Series] = field(repr=False)
    rules: dict[str, np.ndarray] = field(repr=False)

    @property
    def healthy(self) -> bool:
        """Return whether the run has no fault."""
        return self.kind == HEALTHY

    @property
    def label(self) -> str:
        """Return fault and severity."""
        return f"{self.kind} {self.severity:g}"

    def alarms(self, name: str, threshold: float) -> np.ndarray:
        """Return the steps at which a signal rises above its threshold, or at which a rule raised alerts."""
        if name.startswith("rule: "):
            return self.rules.get(name.removeprefix("rule: "), np.empty(0))
        return passed(*self.series[name], threshold)

    def lead(self, alarms: np.ndarray) -> int | None:
        """Return the number of steps from the first alarm after the fault's onset until the loss shows the fault.

        None if the loss shows it first, or never.
        """
        if self.shows is None:
            return None
        inside = alarms[(alarms >= self.onset) & (alarms <= self.shows)]
        return int(self.shows - inside.min()) if len(inside) else None


def scored(runs: Sequence[dict[str, Any]]) -> list[Scored]:
    """Return the runs with the step at which the loss shows a fault, compared with the twin of equal seed and size."""
    twins = {
        (run["family"], run["size"], run["seed"]): dict(map(tuple, run["evaluated"]))
        for run in runs
        if run["kind"] == HEALTHY and run["severity"] == 1
    }
    scored_runs = []
    for run in runs:
        twin = twins.get((run["family"], run["size"], run["seed"]), {})
        shows = None if run["kind"] == HEALTHY else shown(run["evaluated"], twin, run["onset"])
        scored_runs.append(
            Scored(
                family=run["family"],
                kind=run["kind"],
                severity=run["severity"],
                seed=run["seed"],
                onset=run["onset"],
                steps=run["steps"],
                shows=shows,
                series=signals(run),
                rules=rules(run),
            )
        )
    return scored_runs


def shown(evaluated: Sequence[Sequence[float]], twin: dict[int, float], onset: int) -> int | None:
    """Return the step of the first of two evaluations in a row 10 % above the twin's; the last needs no second."""
    above = [
        (int(step), loss > ABOVE * twin[int(step)]) for step, loss in evaluated if step >= onset and int(step) in twin
    ]
    for (step, now), (_, then) in zip(above, [*above[1:], *above[-1:]], strict=True):
        if now and then:
            return step
    return None


class Crossings:
    """The number of times that a signal rises above a threshold in healthy runs, for any threshold."""

    def __init__(self, runs: Iterable[Scored], name: str) -> None:
        pairs = [np.stack([np.concatenate([[-np.inf], v[:-1]]), v]) for v in (run.series[name][1] for run in runs)]
        before, now = np.concatenate(pairs, 1)
        rising = now > before
        self.before, self.now = np.sort(before[rising]), np.sort(now[rising])

    def count(self, threshold: np.ndarray | float) -> np.ndarray:
        """Return how many times the signal rises above the threshold."""
        above = len(self.now) - np.searchsorted(self.now, threshold, side="right")
        already = len(self.before) - np.searchsorted(self.before, threshold, side="right")
        return above - already

    def least(self, allowed: float) -> float:
        """Return the smallest threshold such that neither it nor any larger one is passed more often than allowed."""
        if not len(self.now):
            return -np.inf
        candidates = np.unique(self.now[np.isfinite(self.now)])
        if not len(candidates):
            return np.inf
        too_often = np.flatnonzero(self.count(candidates) > allowed)
        if not len(too_often):
            return float(candidates[0])
        return float(candidates[too_often[-1] + 1]) if too_often[-1] + 1 < len(candidates) else np.inf


@dataclass(frozen=True)
class Point:
    """The score of an alarm at one threshold, on runs that were not used to set it.

    Attributes:
        faults: the number of faults that showed in the loss.
        leads: for each caught fault, the steps from the alarm to the loss.
        false: the number of alarms in healthy runs.
        healthy: the number of steps of healthy runs.
    """

    name: str
    threshold: float
    faults: int
    leads: tuple[int, ...]
    false: int
    healthy: int

    @property
    def caught(self) -> float:
        """Return the share of shown faults that were caught no later than the loss showed them."""
        return len(self.leads) / self.faults if self.faults else float("nan")

    @property
    def rate(self) -> float:
        """Return the false alarms per 1,000 healthy steps."""
        return 1000 * self.false / self.healthy if self.healthy else float("nan")


def measured(runs: Sequence[Scored], name: str, threshold: float) -> Point:
    """Return the score of a signal or shipped rule on runs."""
    healthy = [run for run in runs if run.healthy]
    failing = [run for run in runs if run.shows is not None]
    leads = [run.lead(run.alarms(name, threshold)) for run in failing]
    false = sum(len(run.alarms(name, threshold)) for run in healthy)
    return Point(
        name,
        threshold,
        len(failing),
        tuple(one for one in leads if one is not None),
        false,
        sum(run.steps for run in healthy),
    )


def halves(runs: Sequence[Scored]) -> tuple[list[Scored], list[Scored]]:
    """Return the runs for setting thresholds, of even seeds, and those for testing them, of odd seeds."""
    listed = [run for run in runs if run.kind != UNLISTED]
    return [run for run in listed if run.seed % 2 == 0], [run for run in listed if run.seed % 2]


def thresholds(fixing: Sequence[Scored], target: float = TARGET) -> dict[str, float]:
    """Return each signal's smallest threshold at which healthy runs have at most `target` false alarms per step."""
    healthy = [run for run in fixing if run.healthy]
    steps = sum(run.steps for run in healthy)
    names = [name for name in healthy[0].series if name != JUDGED] if healthy else []
    return {name: Crossings(healthy, name).least(target * steps) for name in names}


def sure_threshold(fixing: Sequence[Scored], name: str, target: float = TARGET) -> float:
    """Return the smallest threshold at which the upper end of the interval of false alarms is at most `target` a step.

    The interval is Garwood's (1936). The threshold is infinite if there are too few healthy steps.
    """
    from scipy import stats

    healthy = [run for run in fixing if run.healthy]
    steps = sum(run.steps for run in healthy)
    allowed = -1
    while stats.chi2.ppf(0.975, 2 * (allowed + 1) + 2) / 2 <= target * steps:
        allowed += 1
    return Crossings(healthy, name).least(allowed) if allowed >= 0 else np.inf


def curve(fixing: Sequence[Scored], reported: Sequence[Scored], name: str) -> list[Point]:
    """Return an operating curve: thresholds set on one half at each target, tested on the other."""
    healthy = [run for run in fixing if run.healthy]
    steps, crossings = sum(run.steps for run in healthy), Crossings(healthy, name)
    return [measured(reported, name, crossings.least(target / 1000 * steps)) for target in TARGETS]


@dataclass(frozen=True)
class Pair:
    """Two signals, either of which raises the alarm, each with half of the allowed false alarms."""

    names: tuple[str, str]
    thresholds: tuple[float, float]

    @property
    def name(self) -> str:
        """Return both names."""
        return " or ".join(self.names)

    def alarms(self, run: Scored) -> np.ndarray:
        """Return the steps at which either signal rises above its threshold."""
        both = [run.alarms(name, threshold) for name, threshold in zip(self.names, self.thresholds, strict=True)]
        return np.unique(np.concatenate(both))

    def measured(self, runs: Sequence[Scored]) -> Point:
        """Return the score of the pair; alarms of both at the same step count once."""
        healthy = [run for run in runs if run.healthy]
        failing = [run for run in runs if run.shows is not None]
        leads = [run.lead(self.alarms(run)) for run in failing]
        false = sum(len(self.alarms(run)) for run in healthy)
        steps = sum(run.steps for run in healthy)
        return Point(self.name, np.nan, len(failing), tuple(x for x in leads if x is not None), false, steps)


def best_pair(fixing: Sequence[Scored], names: Sequence[str]) -> Pair | None:
    """Return the pair that catches most on the half for setting thresholds, within the allowed false alarms."""
    fixed = thresholds(fixing, TARGET / 2)
    best: tuple[float, Pair] | None = None
    for at, first in enumerate(names):
        for second in names[at + 1 :]:
            pair = Pair((first, second), (fixed[first], fixed[second]))
            point = pair.measured(fixing)
            if point.rate <= 1000 * TARGET and (best is None or point.caught > best[0]):
                best = point.caught, pair
    return None if best is None else best[1]


def lead_interval(leads: Sequence[int]) -> tuple[float, float, float] | None:
    """Return the median of leads with its 95 % interval between two order statistics; None for fewer than six."""
    from scipy import stats

    if len(leads) < 6:
        return None
    ordered = sorted(leads)
    below = int(stats.binom.ppf(0.025, len(ordered), 0.5))
    return (
        float(np.median(ordered)),
        float(ordered[below - 1 if below else 0]),
        float(ordered[len(ordered) - max(below, 1)]),
    )


def false_interval(point: Point) -> tuple[float, float]:
    """Return the exact interval of a Poisson rate (Garwood 1936), in alarms per 1,000 steps."""
    from scipy import stats

    low = stats.chi2.ppf(0.025, 2 * point.false) / 2 if point.false else 0.0
    high = stats.chi2.ppf(0.975, 2 * point.false + 2) / 2
    return 1000 * low / point.healthy, 1000 * high / point.healthy


def quoted(fixed: dict[str, float], runs: Sequence[Scored], shipped: Sequence[str]) -> dict[str, Any]:
    """Return the scores that alerts quote: of each rule and signal on all runs that were not used to set thresholds."""
    alarms = {name: measured(runs, name, math.nan) for name in shipped}
    alarms |= {name: measured(runs, name, threshold) for name, threshold in fixed.items()}
    return {name.removeprefix("rule: "): _quoted(point) for name, point in alarms.items()}


def _quoted(point: Point) -> dict[str, Any]:
    lead = lead_interval(point.leads)
    caught_share = share([1.0] * len(point.leads) + [0.0] * (point.faults - len(point.leads)))
    low, high = false_interval(point) if point.healthy else (None, None)
    return {
        "threshold": point.threshold if math.isfinite(point.threshold) else None,
        "faults": point.faults,
        "caught": len(point.leads),
        "share": [caught_share.mean, caught_share.low, caught_share.high],
        "lead": None if not point.leads else float(np.median(point.leads)),
        "lead_interval": None if lead is None else list(lead[1:]),
        "false_alarms": point.false,
        "healthy_steps": point.healthy,
        "per_1000": [point.rate if point.healthy else None, low, high],
    }


def write_csv(path: Path, points: dict[str, tuple[Point, Point, Point]]) -> None:
    """Write the scores of every signal at its operating point, on each part of the runs."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream, lineterminator="\n")
        rows.writerow(
            ["signal", "threshold", "runs", "faults", "caught", "median lead", "false alarms", "healthy steps"]
        )
        for name, parts in points.items():
            for part, point in zip(("fixed on", "other half", "held out"), parts, strict=True):
                lead = float(np.median(point.leads)) if point.leads else ""
                rows.writerow(
                    [
                        name,
                        f"{point.threshold:.6g}",
                        part,
                        point.faults,
                        len(point.leads),
                        lead,
                        point.false,
                        point.healthy,
                    ]
                )


def write_curves(path: Path, curves: dict[str, list[Point]]) -> None:
    """Write the points of every operating curve."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream, lineterminator="\n")
        rows.writerow(["signal", "threshold", "false alarms in 1,000 steps", "faults", "caught", "median lead"])
        for name, points in curves.items():
            for point in points:
                lead = float(np.median(point.leads)) if point.leads else ""
                rows.writerow(
                    [name, f"{point.threshold:.6g}", f"{point.rate:.6g}", point.faults, len(point.leads), lead]
                )
