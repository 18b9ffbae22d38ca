"""Write a kept study's seeds.csv from its kept differences and a second run of its baseline, if they give its means.

headwise compare STUDY --scale small --method baseline --out FOLDER
python docs/seeds_from_baseline.py FOLDER docs/results/STUDY

The differences of the other arms from the baseline were kept by seed, so the baseline's figures give those of all arms.
Nothing is written unless the mean and the interval of every arm in every outcome, computed from these figures, are
those of analysis.json to a thousandth of the standard error. Measured times, which no second run repeats, are named by
--without and get no figures; nor does an arm in an outcome that no run of the baseline has.
"""

from __future__ import annotations

import argparse
import csv
import re
from pathlib import Path

import numpy as np
from keep_results import SEEDS
from recompute import read
from scipy import stats

from headwise_verdict.results.analysis_record import Analysis, Interval
from headwise_verdict.results.folder import read_study
from headwise_verdict.results.records import OutcomeNames
from headwise_verdict.results.stored import checked_analysis

Figures = dict[tuple[str, str], dict[int, float]]


def figures(folder: Path, kept: Path, analysis: Analysis, without: str = "") -> Figures:
    """Return the figures by outcome, arm and seed: the baseline's, and those of the others from their differences."""
    study, differences = read_study(folder), read(kept)
    found: Figures = {}
    for name, outcome in analysis.outcomes.items():
        if outcome.kind == "cost" or name == OutcomeNames.DIVERGED or (without and re.search(without, name)):
            continue
        own = {seed: study.figure(study.baseline, seed, name) for seed in analysis.seeds}
        base = {seed: value for seed, value in own.items() if value is not None}
        found[name, analysis.baseline] = base
        for arm in analysis.compared:
            by_seed = differences.get(name, {}).get(arm.label, {})
            found[name, arm.label] = {
                int(seed): base[int(seed)] + gap for seed, gap in by_seed.items() if int(seed) in base
            }
    # differences from figures that the baseline does not have were not kept
    return {cell: by_seed for cell, by_seed in found.items() if by_seed}


def unlike(found: Figures, analysis: Analysis) -> list[str]:
    """Return the outcomes and arms whose kept mean or interval is not that of the figures."""
    arms = {arm.label: arm for arm in analysis.arms}
    return [
        f"{name} of {label}"
        for (name, label), by_seed in found.items()
        if (kept := arms[label].metrics.get(name))
        and kept.mean is not None
        and not _agrees(kept, list(by_seed.values()))
    ]


def _agrees(kept: Interval, values: list[float]) -> bool:
    """Return whether mean and 95 % interval are the kept ones, to a thousandth of the standard error."""
    if len(values) != kept.n:
        return False
    mean, error, critical = float(np.mean(values)), 0.0, 0.0
    if len(values) > 1:
        error, critical = float(np.std(values, ddof=1) / len(values) ** 0.5), float(stats.t.ppf(0.975, len(values) - 1))
    ends = [(kept.mean, mean), (kept.low, mean - critical * error), (kept.high, mean + critical * error)]
    # an interval that reaches beyond the scale of its figure is cut off there
    return all(
        one is None or one in (-1.0, 0.0, 1.0) or np.isclose(one, two, rtol=1e-6, atol=1e-3 * error)
        for one, two in ends
    )


def main() -> None:
    """Write the figures by seed, or list what does not agree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder of the second run of the baseline")
    parser.add_argument("kept", type=Path, help="the kept results of the study")
    parser.add_argument("--without", default="", help="a regular expression of outcomes that are measured times")
    options = parser.parse_args()
    analysis = checked_analysis(options.kept / "analysis.json")
    found = figures(options.folder, options.kept, analysis, options.without)
    if wrong := unlike(found, analysis):
        parser.exit(1, "\n".join([*wrong, f"{len(wrong)} of {len(found)} means or intervals are not the kept ones\n"]))
    with (options.kept / SEEDS).open("w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream, lineterminator="\n")
        rows.writerow(["outcome", "arm", "seed", "value"])
        for (name, label), by_seed in found.items():
            rows.writerows([name, label, seed, repr(value)] for seed, value in by_seed.items())
        for arm in analysis.arms:
            diverged = {one.seed for one in arm.runs.diverged}
            ended = [seed for seed in analysis.seeds if seed not in arm.runs.missing]
            rows.writerows([OutcomeNames.DIVERGED, arm.label, seed, repr(float(seed in diverged))] for seed in ended)
    print(f"{options.kept / SEEDS}: {len(found)} means and intervals are the kept ones")


if __name__ == "__main__":
    main()
