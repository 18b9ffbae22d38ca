"""Recompute every interval, p and verdict of the kept results from their CSV files, with numpy and scipy alone.

python docs/recompute.py    exit with 1 and list the mismatches if there are any

From each folder it reads differences.csv (outcome, arm, seed, difference) and, if kept, seeds.csv (outcome, arm, seed,
value), and compares the recomputed statistics with analysis.json and claims.json: the interval, p and verdict of every
arm in every outcome, the trends along axes, the tests of divergence, and every test of a claim. A test against a level
whose figures by seed were not kept is compared with the interval in table.csv, whose figures must be those of
analysis.json. The claims of a calculation, and its table of means, are compared with the figures in its findings.json.
The package itself is not imported, so that the check is independent of it.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy import stats

RESULTS = Path(__file__).parent / "results"
LEVEL, MOST, DRAWN = 0.05, 11, 2047
# pairs that a verdict takes: with fewer, all signs agree by chance in more than 5 % of the flips
FEWEST = 6
# share of an interval's width by which two computations of its ends may differ
CLOSE = 1e-5


def signs_of(seeds: int) -> np.ndarray:
    """Return all sign flips of the seeds up to a global sign, or a random sample of them for more than eleven seeds."""
    if seeds > MOST:
        bits = np.random.default_rng(0).integers(0, 2, (DRAWN + 1, seeds))
        bits[0] = 0
        return 1.0 - 2.0 * bits
    if seeds == 0:
        return np.ones((1, 0))
    return np.array([(*rest[::-1], 1.0) for rest in itertools.product((1.0, -1.0), repeat=seeds - 1)]).reshape(
        -1, seeds
    )


def deviates_squared(table: np.ndarray) -> np.ndarray:
    """Return, per column, the square of Wallace's normal deviate of t of the mean over the seeds that are not NaN.

    t² is at most (n − 1)·10⁶. Flips × seeds × arms give flips × arms.
    """
    n = np.isfinite(table).sum(axis=-2)
    total, squares = np.nansum(table, axis=-2), np.nansum(table**2, axis=-2)
    share = np.divide(total**2, n * squares, out=np.zeros_like(total), where=squares > 0)
    share[share < 1e-20] = 0.0
    degrees = np.maximum(n - 1.0, 0.0)
    return ((8 * degrees + 1) / (8 * degrees + 3)) ** 2 * -degrees * np.log(np.maximum(1 - share, 1e-6))


class Family:
    """Arms that are judged together, with their differences as seeds × arms."""

    def __init__(self, table: np.ndarray) -> None:
        self.table = table[np.isfinite(table).any(axis=1)]
        self.n = np.isfinite(self.table).sum(axis=0)
        self.mean = np.nansum(self.table, axis=0) / np.maximum(self.n, 1)
        self.signs = signs_of(len(self.table))
        centred = self.signs[:, :, None] * (self.table - self.mean)
        # nothing can be shown of an arm left with fewer pairs than a verdict takes, so it competes with no other
        self.others = deviates_squared(centred) * (self.n >= min(FEWEST, self.n.max(initial=0)))

    def p(self, arm: int, value: float) -> float:
        """Return the joint p of the hypothesis that an arm's mean difference is `value`."""
        shifted = (self.table[:, arm] - value)[:, None]
        own = deviates_squared(self.signs[:, :, None] * shifted)[:, 0]
        rest = np.delete(self.others, arm, axis=1).max(axis=1, initial=0.0)
        return float((np.maximum(own, rest) >= deviates_squared(shifted)[0] * (1 - 1e-7)).mean())

    def agrees(self, arm: int, low: float, high: float, scale: tuple[float, float] = (-np.inf, np.inf)) -> bool:
        """Return whether an interval is this arm's: the test excludes values just outside its ends, but not inside.

        An interval that reaches beyond the scale of differences ends there.
        """
        column = self.table[np.isfinite(self.table[:, arm]), arm]
        spread = column.std(ddof=1)
        if spread <= 1e-12 * max(1.0, abs(column.mean())):
            return bool(np.isclose(low, column.mean()) and np.isclose(high, column.mean()))
        if max(2.0 ** (1 - len(column)), 0 if len(column) <= MOST else 1 / (DRAWN + 1)) >= LEVEL:
            half = stats.t.ppf(1 - LEVEL / 2 / self.table.shape[1], len(column) - 1) * spread / np.sqrt(len(column))
            ends = np.clip((column.mean() - half, column.mean() + half), *scale)
            return bool(np.allclose((low, high), ends, rtol=1e-6))
        step = CLOSE * (high - low)
        return all(
            self.p(arm, end - way * step) >= LEVEL
            and (bool(np.isclose(end, last, rtol=1e-9)) or self.p(arm, end + way * step) < LEVEL)
            for end, way, last in ((low, -1, scale[0]), (high, 1, scale[1]))
        )


def scale_of(outcome: dict) -> tuple[float, float]:
    """Return the ends of an outcome's scale: those of shares and of their gaps, none of anything else."""
    return (-np.inf, np.inf) if outcome["unit"] != "%" else (-1.0 if outcome["kind"] == "gap" else 0.0, 1.0)


def verdict_of(family: Family, arm: int, p: float, better: bool | None, equivalent: bool) -> str:
    """Return the verdict of an arm from its p."""
    n = int(family.n[arm])
    if n < 2 or max(2.0 ** (1 - n), 0 if n <= MOST else 1 / (DRAWN + 1)) >= LEVEL:
        return "undecided"
    if p < LEVEL:
        higher = bool(family.mean[arm] > 0)
        return ("lower", "higher")[higher] if better is None else ("worse", "better")[higher == better]
    return "equivalent" if equivalent else "no evidence"


def read(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Return the differences by outcome, arm and seed."""
    differences: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    with (folder / "differences.csv").open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            differences[row["outcome"]][row["arm"]][row["seed"]] = float(row["difference"])
    return differences


def mismatches(folder: Path) -> tuple[int, list[str]]:
    """Return how many figures of a folder were recomputed, and descriptions of those that do not agree."""
    analysis, figures, count, wrong = (
        json.loads((folder / "analysis.json").read_text(encoding="utf-8")),
        read(folder),
        0,
        [],
    )
    arms = [arm for arm in analysis["arms"] if arm["label"] != analysis["baseline"]]
    for name, outcome in analysis["outcomes"].items():
        by_arm = figures.get(name, {})
        rows = [[by_arm.get(arm["label"], {}).get(str(seed), np.nan) for arm in arms] for seed in analysis["seeds"]]
        table = np.array(rows, dtype=float)
        if name == "diverged" or not np.isfinite(table).any():
            continue
        family, (lowest, highest) = Family(table), scale_of(outcome)
        scale = lowest - highest, highest - lowest
        for at, arm in enumerate(arms):
            stored = arm["differences"].get(name)
            if not stored or not stored["n"] or stored.get("copies"):
                continue
            p = family.p(at, 0.0)
            margin = analysis["margin"] if name == analysis["primary"] else None
            equal = margin is not None and stored["within"] is not None and stored["within"] < margin
            checks = {
                "mean": np.isclose(family.mean[at], stored["mean"], rtol=1e-9, atol=1e-12),
                "p": np.isclose(p, stored["p_corrected"], atol=1e-9),
                "verdict": stored["verdict"]
                == (
                    "undecided"
                    if stored["low"] is None
                    else verdict_of(family, at, p, outcome["higher_is_better"], equal)
                ),
                "interval": (stored["low"] is None and p >= LEVEL)
                or (stored["low"] is not None and family.agrees(at, stored["low"], stored["high"], scale)),
            }
            count += len(checks)
            wrong += [
                f"{folder.name}: {check} of {arm['label']} in {name}" for check, right in checks.items() if not right
            ]
    return count, wrong


# columns of table.csv, by their names in an arm's mean and in its difference from the baseline
OF_MEANS = {"mean": "mean", "low": "low", "high": "high"}
OF_DIFFERENCES = {
    "difference": "mean",
    "difference_low": "low",
    "difference_high": "high",
    "pairs": "n",
    "p": "p",
    "p_corrected": "p_corrected",
    "verdict_text": "verdict_text",
    "within": "within",
}


def table_mismatches(folder: Path) -> tuple[int, list[str]]:
    """Compare every figure of table.csv with that of analysis.json; return as `mismatches` does."""
    analysis, count, wrong = json.loads((folder / "analysis.json").read_text(encoding="utf-8")), 0, []
    with (folder / "table.csv").open(encoding="utf-8", newline="") as stream:
        rows = {(row["arm"], row["outcome"]): row for row in csv.DictReader(stream)}
    for arm in analysis["arms"]:
        for name in analysis["outcomes"]:
            row, difference = rows.pop((arm["label"], name), {}), arm["differences"].get(name) or {}
            figures = {column: arm["metrics"][name][key] for column, key in OF_MEANS.items()}
            figures |= {column: difference.get(key) for column, key in OF_DIFFERENCES.items()}
            count += len(figures)
            wrong += [
                f"{folder.name}: {column} of {arm['label']} in {name}, in table.csv"
                for column, value in figures.items()
                if row.get(column) != ("" if value is None else str(value))
            ]
    return count, wrong + [f"{folder.name}: {arm} in {name}, in table.csv alone" for arm, name in rows]


def read_seeds(folder: Path) -> dict[str, dict[str, dict[str, float]]] | None:
    """Return the figures by outcome, arm and seed; None if they were not kept."""
    if not (folder / "seeds.csv").is_file():
        return None
    figures: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    with (folder / "seeds.csv").open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            figures[row["outcome"]][row["arm"]][row["seed"]] = float(row["value"])
    return figures


def along(analysis: dict, figures: dict, values: dict | None, outcome: str, arms: list[str]) -> np.ndarray:
    """Return the complete seeds of an axis as seeds × arms.

    Without figures by seed, return differences from the baseline, whose own column is 0.
    """
    if values is not None:
        by_arm = values.get(outcome, {})
        table = np.array(
            [[by_arm.get(arm, {}).get(str(seed), np.nan) for arm in arms] for seed in analysis["seeds"]], dtype=float
        )
        return table[np.isfinite(table).all(axis=1)]
    by_arm = figures.get(outcome, {})
    seeds = {seed for arm in by_arm.values() for seed in arm}
    rows = [
        [0.0 if arm == analysis["baseline"] else by_arm.get(arm, {}).get(str(seed), np.nan) for arm in arms]
        for seed in analysis["seeds"]
        if str(seed) in seeds
    ]
    table = np.array(rows, dtype=float).reshape(-1, len(arms))
    return table[np.isfinite(table).all(axis=1)]


def slopes(table: np.ndarray) -> np.ndarray:
    """Return each seed's slope of the straight line over the positions on an axis."""
    return np.polyfit(np.arange(table.shape[1]), table.T, 1)[0]


def axis_mismatches(folder: Path) -> tuple[int, list[str]]:
    """Compare every trend along an axis with one recomputed from the figures by seed; return as `mismatches` does."""
    analysis, figures, count, wrong = (
        json.loads((folder / "analysis.json").read_text(encoding="utf-8")),
        read(folder),
        0,
        [],
    )
    values = read_seeds(folder)
    for stored in analysis["trends"]:
        table = along(analysis, figures, values, stored["outcome"], stored["arms"])
        if stored["step"] is None or len(table) < 2:
            continue
        steps = slopes(table)
        pages = [stats.page_trend_test(way).pvalue for way in (table, -table)] if stored["page"] is not None else [0.0]
        checks = {
            "seeds": len(table) == stored["seeds"],
            "step": np.isclose(steps.mean(), stored["step"], rtol=1e-6, atol=1e-9 * (1 + abs(table).max())),
            # slopes that are equal except for rounding have several correct counts
            "p": np.isclose(Family(steps[:, None]).p(0, 0.0), stored["p"], atol=1e-9)
            or abs(steps.mean()) < 1e-9 * (1 + abs(table).max()),
            "Page": stored["page"] is None
            or _ties(table)
            or np.isclose(min(1.0, 2 * min(pages)), stored["page"], rtol=1e-6, atol=1e-12),
        }
        count += len(checks)
        wrong += [
            f"{folder.name}: {check} of {stored['outcome']} along {stored['axis']}"
            for check, right in checks.items()
            if not right
        ]
    return count, wrong


def _ties(table: np.ndarray) -> bool:
    """Return whether a seed has equal figures, whose ties may differ between figures and differences."""
    gaps = np.diff(np.sort(table, axis=1), axis=1)
    return bool((gaps <= 1e-6 * (1e-12 + abs(table).max())).any())


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the two-sided p of McNemar's exact test from the counts of pairs that differ."""
    unlike = only_first + only_second
    return min(1.0, 2 * float(stats.binom.cdf(min(only_first, only_second), unlike, 0.5))) if unlike else 1.0


def diverged_seeds(analysis: dict) -> dict[str, dict[int, bool]]:
    """Return, by arm and seed, whether each run that ended diverged."""
    by_arm = {}
    for arm in analysis["arms"]:
        diverged = {run["seed"] for run in arm["runs"]["diverged"]}
        by_arm[arm["label"]] = {
            seed: seed in diverged for seed in analysis["seeds"] if seed not in arm["runs"]["missing"]
        }
    return by_arm


def divergence_mismatches(folder: Path) -> tuple[int, list[str]]:
    """Compare the tests of divergence with recomputed ones: McNemar's, corrected by the smallest p in joint flips."""
    analysis, count, wrong = json.loads((folder / "analysis.json").read_text(encoding="utf-8")), 0, []
    ended, arms = diverged_seeds(analysis), [arm for arm in analysis["arms"] if arm["divergence"]]
    if not arms:
        return 0, []
    base = ended[analysis["baseline"]]
    others = [arm["label"] for arm in analysis["arms"] if arm["label"] != analysis["baseline"]]
    table = np.array(
        [
            [ended[arm][seed] - base[seed] if seed in ended[arm] and seed in base else 0 for arm in others]
            for seed in analysis["seeds"]
        ]
    )
    flipped = signs_of(len(table)) @ table
    unlike = abs(table).sum(axis=0)
    by_flip = np.array(
        [[mcnemar(int((n + s) // 2), int((n - s) // 2)) for n, s in zip(unlike, row)] for row in flipped]
    )
    observed = np.array([mcnemar(int((column > 0).sum()), int((column < 0).sum())) for column in table.T])
    corrected, remaining, last = {}, list(np.argsort(observed, kind="stable")), 0.0
    while remaining:
        at = remaining[0]
        last = max(last, float((by_flip[:, remaining].min(axis=1) <= observed[at] * (1 + 1e-7)).mean()))
        corrected[others[at]] = last
        remaining = remaining[1:]
    for arm in arms:
        stored, label = arm["divergence"], arm["label"]
        column = table[:, others.index(label)]
        checks = {
            "only this arm": int((column > 0).sum()) == stored["only_arm"],
            "only the baseline": int((column < 0).sum()) == stored["only_baseline"],
            "p": np.isclose(observed[others.index(label)], stored["p"], atol=1e-9),
            "corrected p": np.isclose(corrected[label], stored["p_corrected"], atol=1e-9),
            "verdict": (stored["verdict"] == "no evidence") == (stored["p_corrected"] >= LEVEL),
        }
        count += len(checks)
        wrong += [f"{folder.name}: {check} of diverged runs of {label}" for check, right in checks.items() if not right]
    return count, wrong


def critical_by_seed(analysis: dict, values: list[float], arms: list[str]) -> np.ndarray:
    """Return log10 of each seed's critical rate, between the lowest rate at which it diverges and the one below.

    NaN if it is unknown.
    """
    ended, logs, critical = diverged_seeds(analysis), np.log10(sorted(values)), []
    ordered = [arm for _, arm in sorted(zip(values, arms))]
    for seed in analysis["seeds"]:
        state = np.array([ended[arm].get(seed, np.nan) for arm in ordered], dtype=float)
        first = int(np.argmax(state == 1)) if (state == 1).any() else len(state) - 1
        is_known = not np.isnan(state[: first + 1]).any()
        below = max(first - 1, 0) if (state == 1).any() else first
        critical.append((logs[first] + logs[below]) / 2 if is_known else np.nan)
    return np.array(critical)


def critical_mismatches(folder: Path) -> tuple[int, list[str]]:
    """Compare the critical learning rates and their differences with ones recomputed from the divergences."""
    analysis = json.loads((folder / "analysis.json").read_text(encoding="utf-8"))
    stored, count, wrong = analysis.get("critical_rates") or [], 0, []
    arms = {one["axis"]: one for one in analysis["trends"]}
    columns = []
    for one in stored:
        axis = arms.get(one["axis"]) or arms["learning_rate"]
        columns.append(critical_by_seed(analysis, axis["values"], axis["arms"]))
    if not stored:
        return 0, []
    gaps = (np.array(columns).T - columns[0][:, None])[:, 1:]
    for at, one in enumerate(stored):
        column = columns[at][np.isfinite(columns[at])]
        half = stats.t.ppf(0.975, len(column) - 1) * column.std(ddof=1) / len(column) ** 0.5 if len(column) > 1 else 0
        checks = {
            "seeds": len(column) == one["n"],
            "mean": bool(np.isclose(column.mean(), one["mean"])),
            "interval": one["low"] is None or bool(np.isclose(column.mean() - half, one["low"])),
        }
        if one["difference"] is not None:
            family, place = Family(gaps), at - 1
            checks["difference"] = bool(np.isclose(family.mean[place], one["difference"]))
            checks["p"] = bool(np.isclose(family.p(place, 0.0), one["p"], atol=1e-9))
            if one["difference_low"] is not None:
                ends = one["difference_low"], one["difference_high"]
                checks["interval of the difference"] = family.agrees(place, *ends)
        count += len(checks)
        failed = [check for check, right in checks.items() if not right]
        wrong += [f"{folder.name}: {check} of the critical rate of {one['axis']}" for check in failed]
    return count, wrong


def claims_mismatches(folder: Path) -> tuple[int, list[str]]:
    """Compare every test of a claim or premise with one recomputed from the CSV files, each judged alone."""
    path = folder / "claims.json"
    if not path.is_file():
        return 0, []
    analysis, stored = (json.loads(one.read_text(encoding="utf-8")) for one in (folder / "analysis.json", path))
    figures, values, count, wrong = read(folder), read_seeds(folder), 0, []
    for claim in [*stored["claims"], *stored.get("premises", [])]:
        for test in claim["tests"]:
            if not test["n"] or test["verdict"] == "not testable here":
                continue
            checks = _checks(folder, analysis, figures, values, test)
            count += len(checks)
            name = claim.get("text") or claim["name"]
            wrong += [
                f"{folder.name}: {check} of {test['arm']} in {test['outcome']}, {name!r}"
                for check, right in checks.items()
                if not right
            ]
    return count, wrong


def _checks(folder: Path, analysis: dict, figures: dict, values: dict | None, test: dict) -> dict[str, bool]:
    """Return, by name of the figure, whether each recomputed figure of a test agrees."""
    if test["says"] in ("rises", "falls", "inside"):
        axis = next(
            (
                one
                for one in analysis["trends"]
                if one["outcome"] == test["outcome"] and _is_axis(test["arm"], one, analysis["baseline"])
            ),
            None,
        )
        if axis is None:
            return {}
        table = along(analysis, figures, values, test["outcome"], axis["arms"])
        if test["outcome"] == "diverged":
            ended = diverged_seeds(analysis)
            rows = [[ended[arm].get(seed, np.nan) for arm in axis["arms"]] for seed in analysis["seeds"]]
            table = np.array(rows, dtype=float)
            table = table[np.isfinite(table).all(axis=1)]
        if not len(table):
            return {}
        return _inside(analysis, test, table) if test["says"] == "inside" else _column(test, slopes(table))
    if test["outcome"] == "critical_rate":
        return _of_rates(analysis, test)
    if test["outcome"] == "diverged" and test["level"] is None:
        return _by_pairs(analysis, test)
    if test["outcome"] == "diverged":
        ended = diverged_seeds(analysis)[test["arm"]]
        ends = -test["level"], 1.0 - test["level"]
        return _column(test, np.array([float(one) for one in ended.values()]) - test["level"], ends)
    if test["level"] is not None or test["against_outcome"]:
        return _from_values(folder, analysis, values, test)
    sides = [figures.get(test["outcome"], {}).get(arm, {}) for arm in (test["arm"], test["against"])]
    ours, other = (
        None if arm == analysis["baseline"] else side for arm, side in zip((test["arm"], test["against"]), sides)
    )
    seeds = [
        seed for seed in ours or other or {} if (ours is None or seed in ours) and (other is None or seed in other)
    ]
    if not seeds:
        return {}
    return _column(
        test,
        np.array([(0.0 if ours is None else ours[seed]) - (0.0 if other is None else other[seed]) for seed in seeds])
        - beyond(test),
        _ends(analysis, test),
    )


def _ends(analysis: dict, test: dict) -> tuple[float, float]:
    """Return where the differences of a test end."""
    low, high = scale_of(analysis["outcomes"][test["outcome"]])
    other = analysis["outcomes"][test["against_outcome"] or test["outcome"]]
    least, most = scale_of(other) if test["level"] is None else (test["level"], test["level"])
    return low - most - beyond(test), high - least - beyond(test)


def beyond(test: dict) -> float:
    """Return the amount that a test subtracts from a difference, negative for "lower"."""
    return (test.get("by") or 0.0) * (-1 if test["says"] == "lower" else 1)


def _column(test: dict, column: np.ndarray, ends: tuple[float, float] = (-np.inf, np.inf)) -> dict[str, bool]:
    family = Family(column[:, None])
    scale = abs(column).max()
    checks = {
        "n": len(column) == test["n"],
        "mean": bool(np.isclose(column.mean(), test["mean"], rtol=1e-6, atol=1e-9 * (1 + scale))),
    }
    checks["interval"] = family.agrees(0, test["low"], test["high"], ends)
    # a test of kept intervals, moved by an amount that was stated later, has no p
    if test["says"] != "same" and test["p"] is not None:
        checks["p"] = bool(np.isclose(family.p(0, 0.0), test["p"], atol=1e-9))
    checks["verdict"] = test["verdict"] in possible_verdicts(test, checks["interval"])
    return checks


def _is_axis(text: str, axis: dict, baseline: str) -> bool:
    """Return whether a sweep's text describes an axis: the same values, and the same text around them in the arms."""
    prefix, _, rest = text.partition("{")
    inner, _, suffix = rest.partition("}")
    same = sorted(map(float, inner.split(","))) == sorted(axis["values"])
    return same and all(arm == baseline or (arm.startswith(prefix) and arm.endswith(suffix)) for arm in axis["arms"])


def _of_rates(analysis: dict, test: dict) -> dict[str, bool]:
    """Return whether a test of critical rates agrees with the divergences."""
    sides = []
    for text in [test["arm"]] + ([test["against"]] if test["level"] is None else []):
        axis = next((one for one in analysis["trends"] if _is_axis(text, one, analysis["baseline"])), None)
        if axis is None:
            return {}
        sides.append(critical_by_seed(analysis, axis["values"], axis["arms"]))
    column = sides[0] - (sides[1] if test["level"] is None else test["level"])
    column = column[np.isfinite(column)]
    return _column(test, column) if len(column) else {}


def _inside(analysis: dict, test: dict, table: np.ndarray) -> dict[str, bool]:
    sign = 1 if analysis["outcomes"][test["outcome"]]["higher_is_better"] else -1
    inner = sign * table[:, 1:-1]
    gains = np.concatenate([inner - sign * table[:, [0]], inner - sign * table[:, [-1]]], axis=1)
    family, many = Family(gains), inner.shape[1]
    low, high = scale_of(analysis["outcomes"][test["outcome"]])
    best = max(range(many), key=lambda at: min(family.mean[at], family.mean[many + at]))
    column = min((best, many + best), key=lambda at: family.mean[at])
    # an interval is on one side of 0 if the flips exclude 0
    above = [family.mean[at] > 0 and family.p(at, 0.0) < LEVEL for at in range(2 * many)]
    below = [family.mean[at] < 0 and family.p(at, 0.0) < LEVEL for at in range(2 * many)]
    shown = any(above[at] and above[many + at] for at in range(many))
    contrary = all(below[:many]) or all(below[many:])
    return {
        "n": len(table) == test["n"],
        "mean": bool(np.isclose(family.mean[column], test["mean"], rtol=1e-6, atol=1e-9)),
        "interval": family.agrees(column, test["low"], test["high"], (low - high, high - low)),
        "p": bool(np.isclose(family.p(column, 0.0), test["p"], atol=1e-9)),
        "verdict": test["verdict"] == ("as published" if shown else "contrary" if contrary else "undecided"),
    }


def _by_pairs(analysis: dict, test: dict) -> dict[str, bool]:
    ended = diverged_seeds(analysis)
    both = [
        (ended[test["arm"]][seed], ended[test["against"]][seed])
        for seed in ended[test["arm"]]
        if seed in ended[test["against"]]
    ]
    first, second = sum(one and not two for one, two in both), sum(two and not one for one, two in both)
    p, pairs, sign = mcnemar(first, second), len(both), -1 if test["says"] == "lower" else 1
    bound = max(
        1.0 if one == pairs else float(stats.beta.ppf(1 - LEVEL, one + 1, pairs - one)) for one in (first, second)
    )
    margin = test["margin"] if test["margin"] is not None else abs(test["effect"]) / 2 if test["effect"] else None
    within = margin is not None and bound < margin
    if test["says"] == "same":
        verdict = (
            "as published"
            if within
            else "contrary"
            if p < LEVEL and margin and abs(first - second) > margin * pairs
            else "undecided"
        )
    elif p < LEVEL and first != second:
        verdict = "as published" if sign * (first - second) > 0 else "contrary"
    else:
        verdict = "no effect" if within else "undecided"
    return {
        "n": pairs == test["n"],
        "mean": bool(np.isclose((first - second) / pairs, test["mean"])),
        "p": bool(np.isclose(p, test["p"], atol=1e-9)),
        "verdict": verdict == test["verdict"],
    }


def _from_values(folder: Path, analysis: dict, values: dict | None, test: dict) -> dict[str, bool]:
    """Return whether a test against a level or another outcome agrees with the figures by seed, or else the arm's kept
    interval."""
    if values is not None:
        ours = values.get(test["outcome"], {}).get(test["arm"], {})
        other = values.get(test["against_outcome"] or test["outcome"], {}).get(test["against"], {})
        seeds = [seed for seed in ours if test["level"] is not None or seed in other]
        return (
            _column(
                test,
                np.array([ours[seed] - (other[seed] if test["level"] is None else test["level"]) for seed in seeds])
                - beyond(test),
                _ends(analysis, test),
            )
            if seeds
            else {}
        )
    if test["level"] is None or test["low"] is None:
        return {}
    with (folder / "table.csv").open(encoding="utf-8", newline="") as stream:
        row = next(
            (one for one in csv.DictReader(stream) if (one["arm"], one["outcome"]) == (test["arm"], test["outcome"])),
            None,
        )
    if row is None or not row["low"]:
        return {}
    mean, low, high = (float(row[key]) - test["level"] for key in ("mean", "low", "high"))
    close = bool(np.allclose((mean, low, high), (test["mean"], test["low"], test["high"]), rtol=1e-6, atol=1e-9))
    return {"interval": close, "verdict": test["verdict"] in possible_verdicts(test, close)}


def possible_verdicts(test: dict, holds: bool) -> tuple[str, ...]:
    """Return the verdicts that a confirmed interval (`holds`) allows a test of direction or of equality."""
    if test["n"] < 6 or not holds:
        return ("undecided",)
    within = test["margin"] is not None and max(abs(test["inner_low"]), abs(test["inner_high"])) < test["margin"]
    if test["says"] == "same":
        outside = test["margin"] is not None and (test["low"] > test["margin"] or test["high"] < -test["margin"])
        # a margin wider than a reported effect cannot show sameness
        return ("as published", "margin too wide") if within else ("contrary",) if outside else ("undecided",)
    low, high = (test["low"], test["high"]) if test["says"] in ("higher", "rises") else (-test["high"], -test["low"])
    if high < 0:
        return ("contrary",)
    if low <= 0:
        return ("no effect",) if within else ("undecided",)
    effect = abs(test["effect"]) if test["effect"] else None
    if (test.get("by") or 0.0) < 0:
        # an allowance above a reported effect is not used
        return ("as published", "margin too wide")
    if effect is None or low <= effect <= high:
        return ("as published",)
    return ("same direction, smaller",) if high < effect else ("same direction, larger",)


def findings_mismatches(folder: Path) -> tuple[int, list[str]]:
    """Compare the tests of a calculation's claims with ones recomputed from its figures by repeat."""
    findings = json.loads((folder / "findings.json").read_text(encoding="utf-8"))
    figures, count, wrong = findings.get("figures") or {}, 0, []
    for claim in findings["claims"] if figures else []:
        for test in claim["tests"]:
            ours = [repeat.get(test["outcome"], np.nan) for repeat in figures[test["arm"]]]
            name = test["against_outcome"] or test["outcome"]
            other = None if test["level"] is not None else [one.get(name, np.nan) for one in figures[test["against"]]]
            column = np.array(ours) - (test["level"] if other is None else np.array(other)) - beyond(test)
            checks = _column(test, column[np.isfinite(column)])
            count += len(checks)
            wrong += [
                f"{folder.name}: {check} of {test['arm']} in {test['outcome']}, {claim['text']!r}"
                for check, right in checks.items()
                if not right
            ]
    return count, wrong


def means_mismatches(folder: Path) -> tuple[int, list[str]]:
    """Compare a calculation's table of means with ones recomputed from its figures by repeat, subject by subject."""
    findings, count, wrong = json.loads((folder / "findings.json").read_text(encoding="utf-8")), 0, []
    tables = [table["rows"] for table in findings["tables"] if table["title"] == "Means over repeats"]
    for subject, repeats in (findings.get("figures") or {}).items() if tables else ():
        names = dict.fromkeys(name for figures in repeats for name in figures)
        values = [[figures[name] for figures in repeats if name in figures] for name in names]
        again = sorted((len(some), _mean_in_words(np.array(some))) for some in values)
        count += len(again)
        # rows have the words of a figure and not its name
        if again != sorted((row[2], row[3]) for row in tables[0] if row[0] == subject):
            wrong.append(f"{folder.name}: means over repeats of {subject}")
    return count, wrong


def _mean_in_words(values: np.ndarray) -> str:
    """Return the mean and its Student interval, if the values differ by more than rounding, with four digits."""
    n, mean = len(values), float(values.mean())
    if n < 2 or np.ptp(values) <= 1e-12 * np.abs(values).max():
        return f"{mean:.4g}"
    half = float(stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / np.sqrt(n))
    return f"{mean:.4g} [{mean - half:.4g}, {mean + half:.4g}]"


def _by_seed(rows: list[dict[str, str]]) -> dict[str, dict[str, dict[int, float]]]:
    figures: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        by_seed = figures.setdefault(row["world"], {}).setdefault(row["entry"], {})
        by_seed[int(row["seed"])] = float(row["figure"]) if row["figure"] else np.nan
    return figures


def _spread(*figures: dict[int, float]) -> float:
    """Return the standard deviation of the plain model over all its seeds."""
    return float(np.nanstd([value for by_seed in figures for value in by_seed.values()], ddof=1))


def _middle(values: np.ndarray) -> float:
    """Return the interquartile mean."""
    ordered = np.sort(values)
    ordered = ordered[np.isfinite(ordered)]
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def league_mismatches(folder: Path) -> tuple[int, list[str]]:
    """Compare a league's gains by world, over all worlds and of pairs with ones recomputed from its runs and trials."""
    if not (folder / "runs.csv").exists():
        return 0, []
    names = ("league", "runs", "trials", "aggregate", "fresh_runs", "pair_runs", "pairs")
    tables = {
        name: list(csv.DictReader((folder / f"{name}.csv").read_text(encoding="utf-8").splitlines()))
        for name in names
        if (folder / f"{name}.csv").exists()
    }
    figures, fresh, of_pairs = (_by_seed(tables.get(name, [])) for name in ("runs", "fresh_runs", "pair_runs"))
    plain = {row["world"]: row["entry"] for row in tables["league"] if row["kind"] == "plain"}
    # for a loss, an error or a perplexity, less is better
    signs = {
        row["world"]: -1.0 if re.search(r"loss|error|perplexity", row["outcome"]) else 1.0
        for row in tables["league"]
        if row["outcome"]
    }
    checked, gains = [], {}
    for row in tables["league"]:
        world, entry = row["world"], row["entry"]
        tried = sorted(
            (
                float(one["validation"])
                for one in tables["trials"]
                if (one["world"], one["entry"]) == (world, entry) and one["validation"]
            ),
            key=lambda value: -signs[world] * value,
        )
        if row["validation"]:
            checked.append((f"{world}, {entry}: validation", float(row["validation"]), tried[0]))
        if entry not in figures[world] or entry == plain[world]:
            continue
        own, plain_figures = figures[world][entry], figures[world][plain[world]]
        spread = _spread(plain_figures, fresh.get(world, {}).get(plain[world], {}))
        pairs = np.array([own[seed] - plain_figures[seed] for seed in own])
        gains.setdefault(entry, []).append(signs[world] * pairs / spread)
        checked.append((f"{world}, {entry}: difference", float(row["difference"]), np.nanmean(pairs)))
        checked.append((f"{world}, {entry}: gain", float(row["gain"]), np.nanmean(gains[entry][-1])))
    for row in tables["aggregate"]:
        checked.append((f"aggregate, {row['entry']}", float(row["gain"]), _middle(np.concatenate(gains[row["entry"]]))))
    for row in tables.get("pairs", []):
        if row["world"] == "all":
            continue
        world, parts = row["world"], row["pair"].split("+")
        spread = _spread(figures[world][plain[world]], fresh.get(world, {}).get(plain[world], {}))
        own, own_plain = of_pairs[world][row["pair"]], of_pairs[world][plain[world]]
        gain = np.array([own[seed] - own_plain[seed] for seed in sorted(own)]) * signs[world] / spread
        sums = sum(
            np.array([figures[world][part][seed] - figures[world][plain[world]][seed] for seed in sorted(own)])
            * signs[world]
            / spread
            for part in parts
        )
        checked.append((f"{world}, {row['pair']}: gain", float(row["gain"]), _middle(gain)))
        checked.append((f"{world}, {row['pair']}: over the sum", float(row["over_sum"]), _middle(gain - sums)))
    wrong = [
        f"league: {figure}: kept {kept}, again {again}"
        for figure, kept, again in checked
        if not np.isclose(kept, again, rtol=1e-9, atol=1e-12)
    ]
    return len(checked), wrong


def second_league_mismatches(folder: Path) -> tuple[int, list[str]]:
    """Compare the gains of the league's second edition, in worlds and over them, with ones from its runs alone."""
    tables = {}
    for name in ("gains", "symptoms", "transfer"):
        path = folder / f"{name}.csv"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        tables[name] = list(csv.DictReader(text.splitlines()))
    checked, own = [], {}
    worlds = {name: _world_errors(folder / name) for name in dict.fromkeys(row["world"] for row in tables["gains"])}
    for row in tables["gains"]:
        finals = worlds[row["world"]]
        errors = finals[row["arm"], float(row["rate"])]
        checked.append((f"{row['world']}, {row['contestant']}: test error", float(row["test_error"]), errors.mean()))
        if row["kind"] == "search":
            continue
        plain = min((some for (arm, _), some in finals.items() if arm == "baseline"), key=lambda some: some.mean())
        mean, half, variance = _share_avoided(errors, plain)
        own[row["world"], row["contestant"]] = mean, variance
        for end, value in (("mean", mean), ("low", mean - half), ("high", mean + half)):
            checked.append((f"{row['world']}, {row['contestant']}: {end}", float(row[end]), value))
    of_symptom: dict[str, list[str]] = {}
    for row in tables["transfer"]:
        of_symptom.setdefault(row["symptom"], []).append(row["left_out"])
    for row in tables["symptoms"]:
        names = of_symptom[row["symptom"]]
        if (names[0], row["contestant"]) in own:
            found = _over_worlds([own[name, row["contestant"]] for name in names])
            for end, value in zip(("mean", "low", "high", "new_low", "new_high"), found, strict=True):
                checked.append((f"{row['symptom']}, {row['contestant']}: {end}", float(row[end]), value))
    wrong = [
        f"second league: {figure}: kept {kept}, again {again}"
        for figure, kept, again in checked
        if not np.isclose(kept, again, rtol=1e-6, atol=1e-7)
    ]
    return len(checked), wrong


def _world_errors(folder: Path) -> dict[tuple[str, float], np.ndarray]:
    """Return the errors on the test split by arm and rate, in the order of the final seeds."""
    facts = json.loads((folder / "world.json").read_text(encoding="utf-8"))["facts"]
    found: dict[tuple[str, float], dict[int, float]] = {}
    for row in csv.DictReader((folder / "runs.csv").read_text(encoding="utf-8").splitlines()):
        if int(row["seed"]) < 8 and row["eased"] == "0":
            value = float(row["test"] or facts["failure"])
            error = 1 - value if facts["higher"] else value
            found.setdefault((row["arm"], float(row["rate"])), {})[int(row["seed"])] = error
    return {key: np.array([some[seed] for seed in range(8)]) for key, some in found.items() if len(some) == 8}


def _share_avoided(errors: np.ndarray, plain: np.ndarray) -> tuple[float, float, float]:
    shares = (plain - errors) / plain.mean()
    deviation = float(shares.std(ddof=1) / np.sqrt(len(shares)))
    return float(shares.mean()), float(stats.t.ppf(0.975, len(shares) - 1)) * deviation, deviation**2


def _over_worlds(gains: list[tuple[float, float]]) -> tuple[float, ...]:
    """Return the mean over worlds, its interval, and that for a new world."""
    means, within = np.array([one for one, _ in gains]), float(np.mean([one for _, one in gains]))
    worlds, between = len(means), float(means.var(ddof=1))
    deviation, t = max(between, within) ** 0.5, float(stats.t.ppf(0.975, worlds - 1))
    mean, half, wide = float(means.mean()), t * deviation * worlds**-0.5, t * deviation * (1 + 1 / worlds) ** 0.5
    return mean, mean - half, mean + half, mean - wide, mean + wide


def alarms_mismatches(folder: Path) -> tuple[int, list[str]]:
    """Compare the figures of the rules at the shipped cadence with ones from the alerts of every run."""
    if not (folder / "as_shipped.csv").is_file():
        return 0, []
    stored = json.loads((folder / "as_shipped.json").read_text(encoding="utf-8"))
    with (folder / "as_shipped.csv").open(encoding="utf-8", newline="") as stream:
        runs = [run for run in csv.DictReader(stream) if run["part"] == "tested"]
    count, wrong = 0, []
    for rule, figures in stored.items():
        leads, false, steps, faults = [], 0, 0, 0
        for run in runs:
            found = (one.split(":") for one in run["alerts"].split())
            alerts = {int(step) for name, step in found if rule in (name, "any rule")}
            if run["fault"].startswith("healthy,"):
                # runs whose rate rises for long have a sentence on the page
                continue
            if run["fault"].startswith("healthy"):
                false, steps = false + len(alerts), steps + int(run["steps"])
            elif run["shows"]:
                faults += 1
                inside = [step for step in alerts if int(run["onset"]) <= step <= int(run["shows"])]
                leads += [int(run["shows"]) - min(inside)] if inside else []
        again = {
            "faults": faults,
            "caught": len(leads),
            "lead": float(np.median(leads)) if leads else None,
            "false_alarms": false,
            "healthy_steps": steps,
        }
        checks = {name: figures[name] == value for name, value in again.items()}
        checks["per_1000"] = bool(np.allclose(_per_1000(false, steps), figures["per_1000"]))
        count += len(checks)
        wrong += [f"{folder.name}: {name} of {rule} as shipped" for name, right in checks.items() if not right]
    return count, wrong


def _per_1000(false: int, steps: int) -> np.ndarray:
    """Return false alarms in 1,000 steps with Garwood's interval."""
    ends = [stats.chi2.ppf(q, 2 * false + more) / 2 for q, more in ((0.025, 0), (0.975, 2))]
    return 1000 * np.nan_to_num(np.array([false, *ends])) / steps


def elsewhere_mismatches(folder: Path) -> tuple[int, list[str]]:
    """Compare the false alarms in other trainings with ones from the alerts of every run."""
    if not (folder / "elsewhere.csv").is_file():
        return 0, []
    stored = json.loads((folder / "elsewhere.json").read_text(encoding="utf-8"))
    with (folder / "elsewhere.csv").open(encoding="utf-8", newline="") as stream:
        healthy = [run for run in csv.DictReader(stream) if run["onset"] == "0"]
    steps, wrong = sum(int(run["steps"]) for run in healthy), []
    for rule, figures in stored.items():
        found = [
            {one.split(":")[1] for one in run["alerts"].split() if rule in (one.split(":")[0], "any rule")}
            for run in healthy
        ]
        false = sum(map(len, found))
        again = {"false_alarms": false, "healthy_steps": steps}
        checks = {name: figures[name] == value for name, value in again.items()}
        checks["per_1000"] = bool(np.allclose(_per_1000(false, steps), figures["per_1000"]))
        wrong += [f"{folder.name}: {name} of {rule} elsewhere" for name, right in checks.items() if not right]
    return 3 * len(stored), wrong


CHECKS = (mismatches, table_mismatches, axis_mismatches, divergence_mismatches, critical_mismatches, claims_mismatches)


def main() -> None:
    """Recompute every kept result and print the mismatches."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the kept results")
    parser.add_argument("studies", nargs="*", help="names of kept studies; none: all")
    options = parser.parse_args()
    total, wrong = 0, []
    for path in sorted(options.results.glob("*/differences.csv")):
        if not options.studies or path.parent.name in options.studies:
            for check in CHECKS:
                count, mismatched = check(path.parent)
                total, wrong = total + count, wrong + mismatched
    for path in sorted(options.results.glob("*/findings.json")):
        if not options.studies or path.parent.name in options.studies:
            for check in (findings_mismatches, means_mismatches):
                count, mismatched = check(path.parent)
                total, wrong = total + count, wrong + mismatched
    if not options.studies or "alarms" in options.studies:
        for alarms in (alarms_mismatches, elsewhere_mismatches):
            count, mismatched = alarms(options.results / "alarms")
            total, wrong = total + count, wrong + mismatched
    if not options.studies:
        count, mismatched = league_mismatches(options.results.parent / "league")
        total, wrong = total + count, wrong + mismatched
        count, mismatched = second_league_mismatches(options.results.parent / "league" / "second")
        total, wrong = total + count, wrong + mismatched
    print("\n".join([*wrong, f"{total} figures computed again, {len(wrong)} mismatches"]))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
