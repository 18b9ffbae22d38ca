"""Compare a second run of a study with its kept results, on the seeds that both have.

python docs/second_run.py results/blog-cifar10 docs/results/blog-cifar10

Prints a Markdown row for each outcome with kept differences: how many differences from the baseline are equal to the
bit, the largest change of a mean over seeds, and for scale the standard error of the kept mean over as many seeds.
With --summary, prints one row for the study, without times, as in docs/results/second_runs.md.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from keep_results import DIFFERENCES

from headwise_verdict.files.errors import StudyError
from headwise_verdict.reporting.outcome_texts import unit_of
from headwise_verdict.results.folder import StudyFolder, read_study

HEADER = (
    "| outcome | arms | equal to the bit | largest change of a mean | its standard error over these seeds |\n"
    "| --- | --- | --- | --- | --- |"
)


def kept_differences(kept: Path) -> dict[str, dict[str, dict[int, float]]]:
    """Return the kept differences from the baseline by outcome, arm and seed."""
    by_outcome: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    with (kept / DIFFERENCES).open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            if row["difference"]:
                by_outcome[row["outcome"]][row["arm"]][int(row["seed"])] = float(row["difference"])
    return by_outcome


def measured_differences(study: StudyFolder, outcome: str) -> dict[str, dict[int, float]]:
    """Return the differences from the baseline of a finished study by arm and seed."""
    values = {
        (arm, run.seed): value
        for arm in study.arms
        for run in study.of(arm)
        if (value := study.figure(arm, run.seed, outcome)) is not None
    }
    return {
        arm: {
            seed: value - values[study.baseline, seed]
            for (of, seed), value in values.items()
            if of == arm and (study.baseline, seed) in values
        }
        for arm in study.arms
        if arm != study.baseline
    }


@dataclass
class Agreement:
    """How the differences of one outcome from the baseline agree with the kept ones, over all arms."""

    equal: int
    total: int
    # for each arm the change of the mean over seeds, and the standard error of the kept mean over as many seeds
    changes: list[tuple[float, float]]


def agreement(study: StudyFolder, outcome: str, kept: dict[str, dict[int, float]]) -> Agreement | None:
    """Return the agreement of an outcome, or None if the second run did not measure it."""
    equal, total, changes = 0, 0, []
    for arm, again in measured_differences(study, outcome).items():
        shared = sorted(again.keys() & kept.get(arm, {}).keys())
        if not shared:
            continue
        equal += sum(again[seed] == kept[arm][seed] for seed in shared)
        total += len(shared)
        change = statistics.fmean(again[seed] - kept[arm][seed] for seed in shared)
        every = list(kept[arm].values())
        error = statistics.stdev(every) / math.sqrt(len(shared)) if len(every) > 1 else math.nan
        changes.append((abs(change), error))
    return Agreement(equal, total, changes) if changes else None


def row(study: StudyFolder, outcome: str, of: Agreement) -> str:
    """Return the row of an outcome."""
    unit = unit_of(study.study.outcome(outcome))
    largest, error = (f"{unit.number(value)} {unit.difference}".strip() for value in max(of.changes))
    return f"| {outcome} | {len(of.changes)} | {of.equal} of {of.total} | {largest} | {error} |"


def summary(name: str, seeds: int, agreements: dict[str, Agreement]) -> str:
    """Return the row of a study: equal differences, and the median and largest change of a mean in standard errors."""
    equal = sum(one.equal for one in agreements.values())
    total = sum(one.total for one in agreements.values())
    every = [(outcome, *both) for outcome, one in agreements.items() for both in one.changes]
    relative = [change / error if error > 0 else 0.0 for _, change, error in every if error > 0 or not change]
    changes = f"{statistics.median(relative):.2g}, {max(relative):.2g}" if relative else "–"
    # a figure that is the same for all kept seeds has no error, so its change is given as it is
    fixed = [(change, outcome) for outcome, change, error in every if change and not error > 0]
    if fixed:
        change, outcome = max(fixed)
        changes += f"; of figures that are the same for all kept seeds, {outcome} changes most, by {change:.2g}"
    return f"| {name} | {seeds} | {len(agreements)} | {equal:,} of {total:,} | {changes} |"


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder of the second run")
    parser.add_argument("kept", type=Path, help="the folder of the kept results")
    parser.add_argument("--summary", action="store_true", help="print one row for the study")
    options = parser.parse_args()
    try:
        study = read_study(options.folder)
    except StudyError as error:
        parser.exit(1, f"{error}\n")
    measured = {
        outcome: one
        for outcome, kept in kept_differences(options.kept).items()
        if (one := agreement(study, outcome, kept)) is not None
    }
    if options.summary:
        seeds = {run.seed for arm in study.arms for run in study.of(arm)}
        # a time is no figure that a second run should give again
        repeatable = {outcome: one for outcome, one in measured.items() if outcome.rpartition("/")[2] != "time"}
        print(summary(study.study.name, len(seeds), repeatable))
        return
    print(HEADER)
    print("\n".join(row(study, outcome, one) for outcome, one in measured.items()))


if __name__ == "__main__":
    main()
