"""How fast statistics of heads change over a watched run: the rate of the exponential that fits their readings, as outcomes."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

from headwise.files.durable import read_lines

# a rate is told in e-folds per so many steps
STEPS = 1000


def head_rates(stream: Path, names: tuple[str, ...]) -> dict[str, float]:
    """Give rates/<statistic>/rate, the slope of ln(mean over heads) in 1/1,000 steps, and rates/<statistic>/fit, its R².

    Readings at which the mean is not above 0 have no logarithm and are left out; fewer than three others give no outcome.
    """
    found: dict[str, float] = {}
    for name, course in _courses(stream, names).items():
        points = [(step, math.log(mean)) for step, mean in sorted(course.items()) if mean > 0]
        if len(points) > 2:
            slope, fit = straight_line(points)
            found |= {f"rates/{name}/rate": STEPS * slope, f"rates/{name}/fit": fit}
    return found


def straight_line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Give slope and R² of the least-squares line through points (x, y); R² is 1 where all y are equal."""
    count = len(points)
    x_mean, y_mean = (math.fsum(point[axis] for point in points) / count for axis in (0, 1))
    x_spread = math.fsum((x - x_mean) ** 2 for x, _ in points)
    y_spread = math.fsum((y - y_mean) ** 2 for _, y in points)
    together = math.fsum((x - x_mean) * (y - y_mean) for x, y in points)
    return together / x_spread, together**2 / (x_spread * y_spread) if y_spread else 1.0


def _courses(stream: Path, names: tuple[str, ...]) -> dict[str, dict[int, float]]:
    values: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in names}
    for record in read_lines(stream):
        if record.get("statistic") in values and "alert" not in record:
            # a reading that is no number is written as null; its mean has no logarithm
            values[record["statistic"]][record["step"]].append(math.nan if record["value"] is None else record["value"])
    return {
        name: {step: math.fsum(heads) / len(heads) for step, heads in course.items()} for name, course in values.items()
    }
