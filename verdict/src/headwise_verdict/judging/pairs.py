"""Judging pairs of runs that are trained one after the other until the evidence decides."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headwise_verdict.files.durable import write_bytes
from headwise_verdict.files.errors import StudyError
from headwise_verdict.files.ownership import claim
from headwise_verdict.judging.decision import GO_ON, Decision, Rule, of_differences
from headwise_verdict.judging.runs import check_diverged

BASELINE = "baseline"
# the table of the pairs, as `headwise judge TABLE` reads it
TABLE = "judged.csv"


@dataclass(frozen=True)
class PairOfRuns:
    """The two runs of one seed."""

    seed: int
    candidate: float
    baseline: float
    # whether weights and batches, as far as the script tells them, were the same
    alike: bool
    # those of its runs that diverged: "candidate", "baseline"
    diverged: tuple[str, ...] = ()


class Paired(Protocol):
    """What trains pairs of runs, such as a script and a change of it."""

    @property
    def command(self) -> str:
        """Return the command that trains once."""

    @property
    def change(self) -> str:
        """Return the change that is judged."""

    @property
    def metric(self) -> str:
        """Return the metric and its better direction: val_loss:lower."""

    @property
    def diverged(self) -> float | None:
        """Return the figure of a run that diverged; None: such a run is refused."""

    @property
    def folder(self) -> Path:
        """Return the folder of the runs."""

    def check(self) -> None:
        """Raise StudyError if no pair can be trained."""

    def pairs(self) -> Iterator[PairOfRuns]:
        """Train a pair for one seed after another."""


def check_budget(paired: Paired, rule: Rule) -> None:
    """Raise StudyError if the rule has no budget, or no pair can be trained."""
    if rule.budget is None:
        raise StudyError("--script needs --budget, the most pairs to run: a change that does nothing is never decided.")
    paired.check()


def judge_pairs(paired: Paired, rule: Rule) -> Decision:
    """Train pairs until they decide or the rule's budget is spent, and write them as a table; return the decision.

    Raises:
        StudyError: if the rule has no budget, a run fails or diverges, or the script ignores its seed.
    """
    check_budget(paired, rule)
    claim(paired.folder, (TABLE,), shared=True)
    seen: list[PairOfRuns] = []
    ended: list[float] = []
    for pair in paired.pairs():
        seen.append(pair)
        ended += [getattr(pair, name) for name in ("candidate", "baseline") if name not in pair.diverged]
        check_diverged(paired.diverged, ended, higher=rule.higher)
        _write(paired, seen)
        decision = of_differences([one.candidate - one.baseline for one in seen], rule)
        told = f"seed {pair.seed}: {paired.change} {pair.candidate:.6g}, baseline {pair.baseline:.6g}"
        print(f"{told}; {decision.answer}", file=sys.stderr, flush=True)
        if decision.answer != GO_ON:
            break
    lost = [f"{name} with seed {one.seed}" for one in seen for name in one.diverged]
    if lost:
        decision = decision.noted(f"diverged, and counted as {paired.diverged:g}: {', '.join(lost)}")
    apart = [str(one.seed) for one in seen if not one.alike]
    if apart:
        return decision.noted(
            f"seed {', '.join(apart)}: initial weights or batches differ between the arms, so that pairing gains "
            "nothing. Seed the script before it builds the model"
        )
    return decision


def _write(paired: Paired, seen: list[PairOfRuns]) -> None:
    name = paired.metric.rpartition(":")[0]
    rows = [
        (arm, one.seed, value)
        for one in seen
        for arm, value in ((paired.change, one.candidate), (BASELINE, one.baseline))
    ]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("arm", "seed", name), *rows])
    write_bytes(paired.folder / TABLE, text.getvalue().encode())
