"""Signals: series computed from a run's record, with signs such that larger is worse."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from headwise.health.watching.losses import BEFORE, Spikes
from headwise.health.watching.rules import LossSpike, Thresholds
from headwise_papers.alarms.one_run import BEYOND

# signals whose small values are unhealthy
FALLS = ("least entropy", "mean entropy", "entropy of the sharpest row", "effective rank of QK", "update entropy")
# signals that can be negative and so have no logarithm
SIGNED = ("token cosine", "head redundancy")
# number of readings over which a slope is taken, and with which a deviation compares
SPAN, BACK = 6, 20
LEVEL, SLOPE, DEVIATION = "", ", slope", ", deviation"
# the signal that the rule `loss_spike` uses
JUDGED = "loss spike, all 50 there"
# steps and values of one run; unknown values are -inf, which raises no alarm
Series = tuple[np.ndarray, np.ndarray]


def signals(run: dict[str, Any]) -> dict[str, Series]:
    """Return every signal of a run: one value per step, or level, slope and deviation per reading."""
    every = np.arange(run["steps"])
    series_by_name = {
        name: (every, _known([_number(one) for one in values]))
        for name, values in run["every step"].items()
        if name != "loss"
    }
    losses = [_number(one) for one in run["every step"]["loss"]]
    spikes = Spikes(BEFORE, BEFORE).add(math.inf if one is None else one for one in losses)
    series_by_name[JUDGED] = every, _known([one if one is None or one == one else math.inf for one in spikes])
    read = np.asarray(run["read"])
    for name, values in run["readings"].items():
        numbers = [_number(one) for one in values]
        for form, series in _forms(name, numbers):
            series_by_name[name + form] = read, _known(series)
    return series_by_name


def rules(run: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the steps at which each shipped rule raised an alert, and those of any rule.

    The rule on losses is evaluated here, so that runs recorded before this rule existed can be used.
    """
    steps, values = signals(run)[JUDGED]
    pairs = zip(np.append(-math.inf, values[:-1]), values, strict=True)
    lasting = np.asarray([Spikes.lasting(before, value) for before, value in pairs])
    steps_by_rule = {LossSpike.alert: passed(steps, lasting, Thresholds().loss_spike or math.inf)}
    for step, kind in run["alerts"]:
        steps_by_rule[kind] = np.append(steps_by_rule.get(kind, np.empty(0, int)), step)
    return steps_by_rule | {"any rule": np.unique(np.concatenate(list(steps_by_rule.values())))}


def passed(steps: np.ndarray, values: np.ndarray, threshold: float) -> np.ndarray:
    """Return the steps at which values rise above a threshold."""
    over = values > threshold
    return steps[over & ~np.concatenate([[False], over[:-1]])]


def _number(value: float | None) -> float | None:
    return None if value is None else math.inf if value >= BEYOND else value


def _forms(name: str, values: list[float | None]) -> Iterator[tuple[str, list[float | None]]]:
    """Yield level, slope over `SPAN` readings and deviation from earlier ones, with signs such that larger is worse."""
    sign = -1.0 if name in FALLS else 1.0
    yield LEVEL, [_turned(one, sign) for one in values]
    scaled = [one if one is None or math.isinf(one) or name in SIGNED else math.log(max(one, 1e-12)) for one in values]
    slopes: list[float | None] = [None] * min(SPAN, len(scaled))
    for before, now in zip(scaled, scaled[SPAN:], strict=False):
        is_known = before is not None and now is not None and math.isfinite(before)
        slopes.append(_turned(now if math.isinf(now) else now - before, sign) if is_known else _turned(now, sign))  # type: ignore[arg-type,operator]
    yield SLOPE, [None if one is not None and math.isinf(one) and one < 0 else one for one in slopes]
    spikes, deviations = Spikes(BACK), []
    for one in scaled:
        if one is None or math.isinf(one):
            deviations.append(one)
        else:
            deviations.append(_turned(spikes.add([one])[0], sign))
    yield DEVIATION, deviations


def _turned(value: float | None, turn: float) -> float | None:
    # a value that is not finite is the worst, whatever the sign of the signal
    return value if value is None or math.isinf(value) else turn * value


def _known(values: list[float | None]) -> np.ndarray:
    return np.asarray([-np.inf if one is None else one for one in values], dtype=float)
