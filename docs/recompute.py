"""Compute every interval, p and verdict of the kept results again from their CSV, with code of its own: numpy and scipy alone.

python docs/recompute.py    ends with 1 and names what does not agree

Of each folder it reads differences.csv (outcome, arm, seed, difference), and holds what follows from it against analysis.json: the
interval, the p and the verdict of every arm in every outcome. Nothing of the package is imported.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
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
    return np.array([(*rest[::-1], 1.0) for rest in itertools.product((1.0, -1.0), repeat=seeds - 1)]).reshape(-1, seeds)


def t_squared(table: np.ndarray) -> np.ndarray:
    """Return t² of the mean of each column over the present seeds (flips × seeds × arms give flips × arms), at most (n − 1)·10⁶."""
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
        """Return whether an interval is this arm's: inside its ends the test does not exclude, outside of them it does."""
        column = self.table[np.isfinite(self.table[:, arm]), arm]
        spread = column.std(ddof=1)
        if spread <= 1e-12 * max(1.0, abs(column.mean())):
            return bool(np.isclose(low, column.mean()) and np.isclose(high, column.mean()))
        if max(2.0 ** (1 - len(column)), 0 if len(column) <= MOST else 1 / (DRAWN + 1)) >= LEVEL:
            half = stats.t.ppf(1 - LEVEL / 2 / self.table.shape[1], len(column) - 1) * spread / np.sqrt(len(column))
            return bool(np.allclose((low, high), (column.mean() - half, column.mean() + half), rtol=1e-6))
        step = CLOSE * (high - low)
        return all(
            self.p(arm, end - way * step) >= LEVEL > self.p(arm, end + way * step) for end, way in ((low, -1), (high, 1))
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
    said, figures, count, wrong = json.loads((folder / "analysis.json").read_text(encoding="utf-8")), read(folder), 0, []
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
                    == ("undecided" if told["low"] is None else verdict_of(family, at, p, outcome["higher_is_better"], equal)),
                    "interval": (told["low"] is None and p >= LEVEL) or (told["low"] is not None and family.agrees(at, told["low"], told["high"])),
                }
                count += len(checks)
                wrong += [f"{folder.name}: {what} of {arms[column]['label']} in {name}" for what, right in checks.items() if not right]
    return count, wrong


def claims_mismatches(folder: Path) -> tuple[int, list[str]]:
    """Hold the tests of claims that are about a difference of two arms against what follows from the CSV, each by itself."""
    path = folder / "claims.json"
    if not path.is_file():
        return 0, []
    base = json.loads((folder / "analysis.json").read_text(encoding="utf-8"))["baseline"]
    figures, count, wrong = read(folder), 0, []
    for claim in json.loads(path.read_text(encoding="utf-8"))["claims"]:
        for test in claim["tests"]:
            aside = test["level"] is not None or test["against_outcome"] or test["outcome"] == "diverged" or not test["n"]
            if aside or test["says"] not in ("higher", "lower", "same") or test["verdict"] == "not testable here":
                continue
            sides = [figures.get(test["outcome"], {}).get(arm, {}) for arm in (test["arm"], test["against"])]
            ours, other = (None if arm == base else side for arm, side in zip((test["arm"], test["against"]), sides))
            seeds = [seed for seed in ours or other or {} if (ours is None or seed in ours) and (other is None or seed in other)]
            if not seeds:
                continue
            column = [(0.0 if ours is None else ours[seed]) - (0.0 if other is None else other[seed]) for seed in seeds]
            family = Family(np.array(column)[:, None])
            checks = {"n": len(seeds) == test["n"], "mean": np.isclose(np.mean(column), test["mean"], rtol=1e-6, atol=1e-9)}
            checks["interval"] = family.agrees(0, test["low"], test["high"])
            if test["says"] != "same":
                checks["p"] = np.isclose(family.p(0, 0.0), test["p"], atol=1e-9)
            checks["verdict"] = test["verdict"] in allowed(test, checks["interval"])
            count += len(checks)
            wrong += [f"{folder.name}: {what} of {test['arm']} in {test['outcome']}, {claim['text']!r}" for what, right in checks.items() if not right]
    return count, wrong


def allowed(test: dict, holds: bool) -> tuple[str, ...]:
    """Return the verdicts that an interval, which holds, allows a test of a direction or of sameness."""
    if test["n"] < 6 or not holds:
        return ("undecided",)
    within = test["margin"] is not None and max(abs(test["inner_low"]), abs(test["inner_high"])) < test["margin"]
    if test["says"] == "same":
        outside = test["margin"] is not None and (test["low"] > test["margin"] or test["high"] < -test["margin"])
        # a margin wider than an effect of the page shows nothing
        return ("as published", "undecided") if within else ("contrary", "undecided") if outside else ("undecided",)
    low, high = (test["low"], test["high"]) if test["says"] == "higher" else (-test["high"], -test["low"])
    if high < 0:
        return ("contrary",)
    if low <= 0:
        return ("no effect",) if within else ("undecided",)
    effect = abs(test["effect"]) if test["effect"] else None
    if effect is None or low <= effect <= high:
        return ("as published",)
    return ("same direction, smaller",) if high < effect else ("same direction, larger",)


def main() -> None:
    """Compute every kept result again and say what does not agree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the kept results")
    parser.add_argument("studies", nargs="*", help="names of kept studies; none: all")
    given = parser.parse_args()
    total, wrong = 0, []
    for path in sorted(given.results.glob("*/differences.csv")):
        if not given.studies or path.parent.name in given.studies:
            for check in (mismatches, claims_mismatches):
                count, found = check(path.parent)
                total, wrong = total + count, wrong + found
    print("\n".join([*wrong, f"{total} figures computed again, {len(wrong)} mismatches"]))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
