"""Compute every interval, p and verdict of the kept results again from their CSV, with code of its own: numpy and scipy
alone.

python docs/recompute.py    ends with 1 and names what does not agree

Of each folder it reads differences.csv (outcome, arm, seed, difference) and, where it was kept, seeds.csv (outcome,
arm, seed, value), and holds what follows from them against analysis.json and claims.json: the interval, the p and the
verdict of every arm in every outcome, the trends along axes, how often runs diverged, and every test of a claim. A test
against a level, whose figures by seed were not kept, is held against the interval in table.csv. Nothing of the package
is imported.
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
# of an interval's width, by which two ways to find its end may differ
CLOSE = 1e-5


def signs_of(seeds: int) -> np.ndarray:
    """Return every way to flip seeds, the first seed never: a flip of all is none. More than eleven seeds are drawn."""
    if seeds > MOST:
        drawn = np.random.default_rng(0).integers(0, 2, (DRAWN + 1, seeds))
        drawn[0] = 0
        return 1.0 - 2.0 * drawn
    if seeds == 0:
        return np.ones((1, 0))
    return np.array([(*rest[::-1], 1.0) for rest in itertools.product((1.0, -1.0), repeat=seeds - 1)]).reshape(
        -1, seeds
    )


def t_squared(table: np.ndarray) -> np.ndarray:
    """Return t² of the mean of each column over the present seeds (flips × seeds × arms give flips × arms), at most (n
    − 1)·10⁶."""
    n = np.isfinite(table).sum(axis=-2)
    total, squares = np.nansum(table, axis=-2), np.nansum(table**2, axis=-2)
    share = np.divide(total**2, n * squares, out=np.zeros_like(total), where=squares > 0)
    share[share < 1e-20] = 0.0
    return (n - 1) * share / np.maximum(1 - share, 1e-6)


class Family:
    """Holds arms that are judged together, their differences as seeds × arms."""

    def __init__(self, table: np.ndarray) -> None:
        self.table = table[np.isfinite(table).any(axis=1)]
        self.n, self.mean = np.isfinite(self.table).sum(axis=0), np.nanmean(self.table, axis=0)
        self.signs = signs_of(len(self.table))
        centred = self.signs[:, :, None] * (self.table - self.mean)
        self.others = t_squared(centred)

    def p(self, arm: int, value: float) -> float:
        """Return the p that an arm's mean difference is `value`, the other arms around their own means."""
        moved = (self.table[:, arm] - value)[:, None]
        own = t_squared(self.signs[:, :, None] * moved)[:, 0]
        rest = np.delete(self.others, arm, axis=1).max(axis=1, initial=0.0)
        return float((np.maximum(own, rest) >= t_squared(moved)[0] * (1 - 1e-7)).mean())

    def agrees(self, arm: int, low: float, high: float) -> bool:
        """Return whether an interval is this arm's: inside its ends the test does not exclude, outside of them it
        does."""
        column = self.table[np.isfinite(self.table[:, arm]), arm]
        spread = column.std(ddof=1)
        if spread <= 1e-12 * max(1.0, abs(column.mean())):
            return bool(np.isclose(low, column.mean()) and np.isclose(high, column.mean()))
        if max(2.0 ** (1 - len(column)), 0 if len(column) <= MOST else 1 / (DRAWN + 1)) >= LEVEL:
            half = stats.t.ppf(1 - LEVEL / 2 / self.table.shape[1], len(column) - 1) * spread / np.sqrt(len(column))
            return bool(np.allclose((low, high), (column.mean() - half, column.mean() + half), rtol=1e-6))
        step = CLOSE * (high - low)
        return all(
            self.p(arm, end - way * step) >= LEVEL > self.p(arm, end + way * step)
            for end, way in ((low, -1), (high, 1))
        )


def families(table: np.ndarray) -> list[list[int]]:
    """Return the arms with every pair together, and each other one by itself."""
    there = np.isfinite(table)
    whole = there.sum(axis=0) == there.any(axis=1).sum()
    together = [[at for at in range(table.shape[1]) if whole[at]]]
    return [part for part in [*together, *([at] for at in range(table.shape[1]) if not whole[at])] if part]


def verdict_of(family: Family, arm: int, p: float, better: bool | None, equivalent: bool) -> str:
    """Return the verdict that an arm has by its p."""
    n = int(family.n[arm])
    if n < 2 or max(2.0 ** (1 - n), 0 if n <= MOST else 1 / (DRAWN + 1)) >= LEVEL:
        return "undecided"
    if p < LEVEL:
        higher = bool(family.mean[arm] > 0)
        return ("lower", "higher")[higher] if better is None else ("worse", "better")[higher == better]
    return "equivalent" if equivalent else "no evidence"


def read(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Return differences by outcome, arm and seed."""
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    with (folder / "differences.csv").open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            found[row["outcome"]][row["arm"]][row["seed"]] = float(row["difference"])
    return found


def mismatches(folder: Path) -> tuple[int, list[str]]:
    """Return how many figures of a folder were computed again, and those that do not agree with what it says."""
    said, figures, count, wrong = (
        json.loads((folder / "analysis.json").read_text(encoding="utf-8")),
        read(folder),
        0,
        [],
    )
    arms = [arm for arm in said["arms"] if arm["label"] != said["baseline"]]
    for name, outcome in said["outcomes"].items():
        by_arm = figures.get(name, {})
        rows = [[by_arm.get(arm["label"], {}).get(str(seed), np.nan) for arm in arms] for seed in said["seeds"]]
        table = np.array(rows, dtype=float)
        for columns in families(table) if table.size else []:
            if not np.isfinite(table[:, columns]).any():
                continue
            family = Family(table[:, columns])
            for at, column in enumerate(columns):
                told = arms[column]["differences"].get(name)
                if not told or not told["n"] or name == "diverged":
                    continue
                p = family.p(at, 0.0)
                margin = said["margin"] if name == said["primary"] else None
                equal = margin is not None and told["within"] is not None and told["within"] < margin
                checks = {
                    "mean": np.isclose(family.mean[at], told["mean"], rtol=1e-9, atol=1e-12),
                    "p": np.isclose(p, told["p_corrected"], atol=1e-9),
                    "verdict": told["verdict"]
                    == (
                        "undecided"
                        if told["low"] is None
                        else verdict_of(family, at, p, outcome["higher_is_better"], equal)
                    ),
                    "interval": (told["low"] is None and p >= LEVEL)
                    or (told["low"] is not None and family.agrees(at, told["low"], told["high"])),
                }
                count += len(checks)
                wrong += [
                    f"{folder.name}: {what} of {arms[column]['label']} in {name}"
                    for what, right in checks.items()
                    if not right
                ]
    return count, wrong


def read_seeds(folder: Path) -> dict[str, dict[str, dict[str, float]]] | None:
    """Return figures by outcome, arm and seed; None where they were not kept."""
    if not (folder / "seeds.csv").is_file():
        return None
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    with (folder / "seeds.csv").open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            found[row["outcome"]][row["arm"]][row["seed"]] = float(row["value"])
    return found


def along(said: dict, figures: dict, values: dict | None, outcome: str, arms: list[str]) -> np.ndarray:
    """Return the whole seeds × arms of an axis; without figures by seed up to what the baseline has, whose own column
    is 0."""
    if values is not None:
        known = values.get(outcome, {})
        table = np.array(
            [[known.get(arm, {}).get(str(seed), np.nan) for arm in arms] for seed in said["seeds"]], dtype=float
        )
        return table[np.isfinite(table).all(axis=1)]
    known = figures.get(outcome, {})
    seeds = {seed for arm in known.values() for seed in arm}
    rows = [
        [0.0 if arm == said["baseline"] else known.get(arm, {}).get(str(seed), np.nan) for arm in arms]
        for seed in said["seeds"]
        if str(seed) in seeds
    ]
    table = np.array(rows, dtype=float).reshape(-1, len(arms))
    return table[np.isfinite(table).all(axis=1)]


def slopes(table: np.ndarray) -> np.ndarray:
    """Return each seed's slope of the straight line over the places of an axis."""
    return np.polyfit(np.arange(table.shape[1]), table.T, 1)[0]


def axis_mismatches(folder: Path) -> tuple[int, list[str]]:
    """Hold every trend along an axis against what follows from the differences by seed."""
    said, figures, count, wrong = (
        json.loads((folder / "analysis.json").read_text(encoding="utf-8")),
        read(folder),
        0,
        [],
    )
    values = read_seeds(folder)
    for told in said["trends"]:
        table = along(said, figures, values, told["outcome"], told["arms"])
        if told["step"] is None or len(table) < 2:
            continue
        steps = slopes(table)
        pages = [stats.page_trend_test(way).pvalue for way in (table, -table)] if told["page"] is not None else [0.0]
        checks = {
            "seeds": len(table) == told["seeds"],
            "step": np.isclose(steps.mean(), told["step"], rtol=1e-6, atol=1e-9 * (1 + abs(table).max())),
            # equal slopes tie but for rounding: each way of it is a right count
            "p": np.isclose(Family(steps[:, None]).p(0, 0.0), told["p"], atol=1e-9)
            or abs(steps.mean()) < 1e-9 * (1 + abs(table).max()),
            "Page": told["page"] is None
            or _ties(table)
            or np.isclose(min(1.0, 2 * min(pages)), told["page"], rtol=1e-6, atol=1e-12),
        }
        count += len(checks)
        wrong += [
            f"{folder.name}: {what} of {told['outcome']} along {told['axis']}"
            for what, right in checks.items()
            if not right
        ]
    return count, wrong


def _ties(table: np.ndarray) -> bool:
    """Return whether a seed has equal figures: in differences they may tie otherwise than in the figures themselves."""
    gaps = np.diff(np.sort(table, axis=1), axis=1)
    return bool((gaps <= 1e-6 * (1e-12 + abs(table).max())).any())


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p that the unlike pairs are as likely one way as the other."""
    unlike = only_first + only_second
    return min(1.0, 2 * float(stats.binom.cdf(min(only_first, only_second), unlike, 0.5))) if unlike else 1.0


def diverged_seeds(said: dict) -> dict[str, dict[int, bool]]:
    """Return of every arm whether each run that ended diverged."""
    found = {}
    for arm in said["arms"]:
        lost = {run["seed"] for run in arm["runs"]["diverged"]}
        found[arm["label"]] = {seed: seed in lost for seed in said["seeds"] if seed not in arm["runs"]["missing"]}
    return found


def divergence_mismatches(folder: Path) -> tuple[int, list[str]]:
    """Hold the tests of who diverged more often against what follows from the runs: McNemar's, and the least p in joint
    flips, stepping down."""
    said, count, wrong = json.loads((folder / "analysis.json").read_text(encoding="utf-8")), 0, []
    ended, arms = diverged_seeds(said), [arm for arm in said["arms"] if arm["divergence"]]
    if not arms:
        return 0, []
    base = ended[said["baseline"]]
    others = [arm["label"] for arm in said["arms"] if arm["label"] != said["baseline"]]
    table = np.array(
        [
            [ended[arm][seed] - base[seed] if seed in ended[arm] and seed in base else 0 for arm in others]
            for seed in said["seeds"]
        ]
    )
    flipped = signs_of(len(table)) @ table
    unlike = abs(table).sum(axis=0)
    by_flip = np.array(
        [[mcnemar(int((n + s) // 2), int((n - s) // 2)) for n, s in zip(unlike, row)] for row in flipped]
    )
    seen = np.array([mcnemar(int((column > 0).sum()), int((column < 0).sum())) for column in table.T])
    corrected, left, last = {}, list(np.argsort(seen, kind="stable")), 0.0
    while left:
        at = left[0]
        last = max(last, float((by_flip[:, left].min(axis=1) <= seen[at] * (1 + 1e-7)).mean()))
        corrected[others[at]] = last
        left = left[1:]
    for arm in arms:
        told, label = arm["divergence"], arm["label"]
        column = table[:, others.index(label)]
        checks = {
            "only this arm": int((column > 0).sum()) == told["only_arm"],
            "only the baseline": int((column < 0).sum()) == told["only_baseline"],
            "p": np.isclose(seen[others.index(label)], told["p"], atol=1e-9),
            "corrected p": np.isclose(corrected[label], told["p_corrected"], atol=1e-9),
            "verdict": (told["verdict"] == "no evidence") == (told["p_corrected"] >= LEVEL),
        }
        count += len(checks)
        wrong += [f"{folder.name}: {what} of diverged runs of {label}" for what, right in checks.items() if not right]
    return count, wrong


def critical_by_seed(said: dict, values: list[float], arms: list[str]) -> np.ndarray:
    """Return log10 of each seed's critical rate: between the lowest rate at which it diverges and the one below; NaN
    where it is not known."""
    ended, places, found = diverged_seeds(said), np.log10(sorted(values)), []
    ordered = [arm for _, arm in sorted(zip(values, arms))]
    for seed in said["seeds"]:
        state = np.array([ended[arm].get(seed, np.nan) for arm in ordered], dtype=float)
        first = int(np.argmax(state == 1)) if (state == 1).any() else len(state) - 1
        known = not np.isnan(state[: first + 1]).any()
        below = max(first - 1, 0) if (state == 1).any() else first
        found.append((places[first] + places[below]) / 2 if known else np.nan)
    return np.array(found)


def critical_mismatches(folder: Path) -> tuple[int, list[str]]:
    """Hold the critical rates of swept learning rates, and what separates them, against what follows from the
    divergences."""
    said = json.loads((folder / "analysis.json").read_text(encoding="utf-8"))
    told, count, wrong = said.get("critical_rates") or [], 0, []
    arms = {one["axis"]: one for one in said["trends"]}
    columns = []
    for one in told:
        axis = arms.get(one["axis"]) or arms["learning_rate"]
        columns.append(critical_by_seed(said, axis["values"], axis["arms"]))
    if not told:
        return 0, []
    gaps = np.array(columns).T - columns[0][:, None]
    whole = np.isfinite(gaps).any(axis=1).sum() if len(told) > 1 else 0
    together = [at for at in range(1, len(told)) if np.isfinite(gaps[:, at]).sum() == whole]
    for at, one in enumerate(told):
        column = columns[at][np.isfinite(columns[at])]
        half = stats.t.ppf(0.975, len(column) - 1) * column.std(ddof=1) / len(column) ** 0.5 if len(column) > 1 else 0
        checks = {
            "seeds": len(column) == one["n"],
            "mean": bool(np.isclose(column.mean(), one["mean"])),
            "interval": one["low"] is None or bool(np.isclose(column.mean() - half, one["low"])),
        }
        if one["difference"] is not None:
            mine = together if at in together else [at]
            family, place = Family(gaps[:, mine]), mine.index(at)
            checks["difference"] = bool(np.isclose(family.mean[place], one["difference"]))
            checks["p"] = bool(np.isclose(family.p(place, 0.0), one["p"], atol=1e-9))
            if one["difference_low"] is not None:
                ends = one["difference_low"], one["difference_high"]
                checks["interval of the difference"] = family.agrees(place, *ends)
        count += len(checks)
        failed = [what for what, right in checks.items() if not right]
        wrong += [f"{folder.name}: {what} of the critical rate of {one['axis']}" for what in failed]
    return count, wrong


def claims_mismatches(folder: Path) -> tuple[int, list[str]]:
    """Hold every test of a claim or premise against what follows from the CSV, each by itself."""
    path = folder / "claims.json"
    if not path.is_file():
        return 0, []
    said, kept = (json.loads(one.read_text(encoding="utf-8")) for one in (folder / "analysis.json", path))
    figures, values, count, wrong = read(folder), read_seeds(folder), 0, []
    for claim in [*kept["claims"], *kept.get("premises", [])]:
        for test in claim["tests"]:
            if not test["n"] or test["verdict"] == "not testable here":
                continue
            checks = _checks(folder, said, figures, values, test)
            count += len(checks)
            name = claim.get("text") or claim["name"]
            wrong += [
                f"{folder.name}: {what} of {test['arm']} in {test['outcome']}, {name!r}"
                for what, right in checks.items()
                if not right
            ]
    return count, wrong


def _checks(folder: Path, said: dict, figures: dict, values: dict | None, test: dict) -> dict[str, bool]:
    """Return what was computed again of a test, and whether it agrees."""
    if test["says"] in ("rises", "falls", "inside"):
        axis = next(
            (
                one
                for one in said["trends"]
                if one["outcome"] == test["outcome"] and _is_axis(test["arm"], one, said["baseline"])
            ),
            None,
        )
        if axis is None:
            return {}
        table = along(said, figures, values, test["outcome"], axis["arms"])
        if test["outcome"] == "diverged":
            ended = diverged_seeds(said)
            rows = [[ended[arm].get(seed, np.nan) for arm in axis["arms"]] for seed in said["seeds"]]
            table = np.array(rows, dtype=float)
            table = table[np.isfinite(table).all(axis=1)]
        if not len(table):
            return {}
        return _inside(said, test, table) if test["says"] == "inside" else _column(test, slopes(table))
    if test["outcome"] == "critical_rate":
        return _of_rates(said, test)
    if test["outcome"] == "diverged" and test["level"] is None:
        return _by_pairs(said, test)
    if test["level"] is not None or test["against_outcome"]:
        return _from_values(folder, said, values, test)
    sides = [figures.get(test["outcome"], {}).get(arm, {}) for arm in (test["arm"], test["against"])]
    ours, other = (
        None if arm == said["baseline"] else side for arm, side in zip((test["arm"], test["against"]), sides)
    )
    seeds = [
        seed for seed in ours or other or {} if (ours is None or seed in ours) and (other is None or seed in other)
    ]
    if not seeds:
        return {}
    return _column(
        test,
        np.array([(0.0 if ours is None else ours[seed]) - (0.0 if other is None else other[seed]) for seed in seeds]),
    )


def _column(test: dict, column: np.ndarray) -> dict[str, bool]:
    family = Family(column[:, None])
    scale = abs(column).max()
    checks = {
        "n": len(column) == test["n"],
        "mean": bool(np.isclose(column.mean(), test["mean"], rtol=1e-6, atol=1e-9 * (1 + scale))),
    }
    checks["interval"] = family.agrees(0, test["low"], test["high"])
    if test["says"] != "same":
        checks["p"] = bool(np.isclose(family.p(0, 0.0), test["p"], atol=1e-9))
    checks["verdict"] = test["verdict"] in allowed(test, checks["interval"])
    return checks


def _is_axis(text: str, axis: dict, baseline: str) -> bool:
    """Return whether a sweep's text is of an axis: its values, and what stands around them in the arms."""
    before, _, rest = text.partition("{")
    inner, _, after = rest.partition("}")
    same = sorted(map(float, inner.split(","))) == sorted(axis["values"])
    return same and all(arm == baseline or (arm.startswith(before) and arm.endswith(after)) for arm in axis["arms"])


def _of_rates(said: dict, test: dict) -> dict[str, bool]:
    """Hold a test of critical rates against what follows from the divergences."""
    sides = []
    for text in [test["arm"]] + ([test["against"]] if test["level"] is None else []):
        axis = next((one for one in said["trends"] if _is_axis(text, one, said["baseline"])), None)
        if axis is None:
            return {}
        sides.append(critical_by_seed(said, axis["values"], axis["arms"]))
    column = sides[0] - (sides[1] if test["level"] is None else test["level"])
    column = column[np.isfinite(column)]
    return _column(test, column) if len(column) else {}


def _inside(said: dict, test: dict, table: np.ndarray) -> dict[str, bool]:
    sign = 1 if said["outcomes"][test["outcome"]]["higher_is_better"] else -1
    inner = sign * table[:, 1:-1]
    gains = np.concatenate([inner - sign * table[:, [0]], inner - sign * table[:, [-1]]], axis=1)
    family, many = Family(gains), inner.shape[1]
    best = max(range(many), key=lambda at: min(family.mean[at], family.mean[many + at]))
    column = min((best, many + best), key=lambda at: family.mean[at])
    # the flips that exclude 0 say on which side an interval lies
    above = [family.mean[at] > 0 and family.p(at, 0.0) < LEVEL for at in range(2 * many)]
    below = [family.mean[at] < 0 and family.p(at, 0.0) < LEVEL for at in range(2 * many)]
    held = any(above[at] and above[many + at] for at in range(many))
    lost = all(below[:many]) or all(below[many:])
    return {
        "n": len(table) == test["n"],
        "mean": bool(np.isclose(family.mean[column], test["mean"], rtol=1e-6, atol=1e-9)),
        "interval": family.agrees(column, test["low"], test["high"]),
        "p": bool(np.isclose(family.p(column, 0.0), test["p"], atol=1e-9)),
        "verdict": test["verdict"] == ("as published" if held else "contrary" if lost else "undecided"),
    }


def _by_pairs(said: dict, test: dict) -> dict[str, bool]:
    ended = diverged_seeds(said)
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


def _from_values(folder: Path, said: dict, values: dict | None, test: dict) -> dict[str, bool]:
    """Hold a test against a level, or of two outcomes of one arm, against figures by seed, or else against the arm's
    kept interval."""
    if values is not None:
        ours = values.get(test["outcome"], {}).get(test["arm"], {})
        other = values.get(test["against_outcome"] or test["outcome"], {}).get(test["against"], {})
        seeds = [seed for seed in ours if test["level"] is not None or seed in other]
        return (
            _column(
                test,
                np.array([ours[seed] - (other[seed] if test["level"] is None else test["level"]) for seed in seeds]),
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
    return {"interval": close, "verdict": test["verdict"] in allowed(test, close)}


def allowed(test: dict, holds: bool) -> tuple[str, ...]:
    """Return the verdicts that an interval, which holds, allows a test of a direction or of sameness."""
    if test["n"] < 6 or not holds:
        return ("undecided",)
    within = test["margin"] is not None and max(abs(test["inner_low"]), abs(test["inner_high"])) < test["margin"]
    if test["says"] == "same":
        outside = test["margin"] is not None and (test["low"] > test["margin"] or test["high"] < -test["margin"])
        # a margin wider than an effect of the page shows nothing
        return ("as published", "undecided") if within else ("contrary", "undecided") if outside else ("undecided",)
    low, high = (test["low"], test["high"]) if test["says"] in ("higher", "rises") else (-test["high"], -test["low"])
    if high < 0:
        return ("contrary",)
    if low <= 0:
        return ("no effect",) if within else ("undecided",)
    effect = abs(test["effect"]) if test["effect"] else None
    if effect is None or low <= effect <= high:
        return ("as published",)
    return ("same direction, smaller",) if high < effect else ("same direction, larger",)


def league_mismatches(folder: Path) -> tuple[int, list[str]]:
    """Compute gains by world, their interquartile means and the best controls of a league again, from its runs and
    trials."""
    if not (folder / "runs.csv").exists():
        return 0, []
    tables = {
        name: list(csv.DictReader((folder / f"{name}.csv").read_text(encoding="utf-8").splitlines()))
        for name in ("league", "runs", "trials", "aggregate")
    }
    figures: dict[str, dict[str, dict[int, float]]] = {}
    for row in tables["runs"]:
        by_seed = figures.setdefault(row["world"], {}).setdefault(row["entry"], {})
        by_seed[int(row["seed"])] = float(row["figure"]) if row["figure"] else np.nan
    plain = {row["world"]: row["entry"] for row in tables["league"] if row["kind"] == "plain"}
    # of a loss, an error or a perplexity less is better
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
        own, beside = figures[world][entry], figures[world][plain[world]]
        spread = np.nanstd(list(beside.values()), ddof=1)
        pairs = np.array([own[seed] - beside[seed] for seed in own])
        gains.setdefault(entry, []).append(signs[world] * pairs / spread)
        checked.append((f"{world}, {entry}: difference", float(row["difference"]), np.nanmean(pairs)))
        checked.append((f"{world}, {entry}: gain", float(row["gain"]), np.nanmean(gains[entry][-1])))
    for row in tables["aggregate"]:
        ordered = np.sort(np.concatenate(gains[row["entry"]]))
        ordered = ordered[np.isfinite(ordered)]
        cut = len(ordered) // 4
        checked.append((f"aggregate, {row['entry']}", float(row["gain"]), ordered[cut : len(ordered) - cut].mean()))
    wrong = [
        f"league: {what}: kept {kept}, again {again}"
        for what, kept, again in checked
        if not np.isclose(kept, again, rtol=1e-9, atol=1e-12)
    ]
    return len(checked), wrong


def main() -> None:
    """Compute every kept result again and say what does not agree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the kept results")
    parser.add_argument("studies", nargs="*", help="names of kept studies; none: all")
    given = parser.parse_args()
    total, wrong = 0, []
    for path in sorted(given.results.glob("*/differences.csv")):
        if not given.studies or path.parent.name in given.studies:
            for check in (mismatches, axis_mismatches, divergence_mismatches, critical_mismatches, claims_mismatches):
                count, found = check(path.parent)
                total, wrong = total + count, wrong + found
    if not given.studies:
        count, found = league_mismatches(given.results.parent / "league")
        total, wrong = total + count, wrong + found
    print("\n".join([*wrong, f"{total} figures computed again, {len(wrong)} mismatches"]))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
