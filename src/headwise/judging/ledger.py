"""The ledger of decisions: over a sequence of candidates the rate of false discoveries is held online.

LORD++ (Ramdas, Yang, Wainwright and Jordan 2017, arXiv 1710.00499): candidate t is tested at

    α_t = γ_t·w₀ + (α - w₀)·γ_(t-τ₁) + α·Σ_(j≥2) γ_(t-τ_j),   γ_t = t^(-1.3) / ζ(1.3)

with the candidates τ_j that were accepted before and w₀ = α/2. Any γ that sums to 1 is allowed; up to some 800
candidates this one gives each a higher level than that of the paper. The share of accepted candidates that are no
better is then at most α on average, for independent candidates. A level is given to a candidate when it is first looked
at, and stays. The p-value is 1 / (largest e-value), which looking does not spoil. A candidate that is judged by another
metric or against another baseline is another entry: each question has its own chance of a false answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from headwise.files.durable import append_line, lines_of
from headwise.files.errors import StudyError
from headwise.judging.decision import ACCEPT, GO_ON, Decision


@dataclass(frozen=True)
class Entry:
    """One question: the level at which it is tested, and its answer so far."""

    candidate: str
    alpha: float
    answer: str


def levels(accepted: list[bool], alpha: float) -> float:
    """Return the level of the next candidate, after candidates that were accepted or not."""
    t = len(accepted) + 1
    times = [at for at, one in enumerate(accepted, 1) if one]
    level = _gamma(t) * alpha / 2
    if times:
        level += alpha / 2 * _gamma(t - times[0])
    return level + alpha * math.fsum(_gamma(t - at) for at in times[1:])


def _gamma(t: int) -> float:
    # ζ(1.3) = 3.93194921…
    return t**-1.3 / 3.931949211809545


class Ledger:
    """A file of JSON lines: the level of each candidate when it is first looked at, and each answer.

    Args:
        path: of the file; it is made at the first answer.
        metric, baseline: by which and against which candidates are judged.
    """

    def __init__(self, path: Path, metric: str, baseline: str) -> None:
        self.path, self.asked = path, (metric, baseline)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes waiting from the level to the answer: two candidates may not get one place."""
        with FileLock(self.path.with_name(f".{self.path.name}.lock")):
            yield

    def entries(self) -> dict[tuple[str, ...], Entry]:
        """Return the questions in the order in which they were first asked, with their last answers.

        Raises:
            StudyError: if a line is not one of a ledger.
        """
        found: dict[tuple[str, ...], Entry] = {}
        text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.exists() else ""
        for number, line in enumerate(lines_of(text), 1):
            try:
                record = json.loads(line)
                question = tuple(str(record[name]) for name in ("candidate", "metric", "baseline"))
                entry = Entry(question[0], float(record["alpha"]), str(record["answer"]))
            except (ValueError, KeyError, TypeError, RecursionError):
                raise StudyError(
                    f"{self.path}, line {number}, is no line of a ledger. Restore it, or delete it if it was cut off."
                ) from None
            known = found.get(question)
            found[question] = entry if known is None else Entry(question[0], known.alpha, entry.answer)
        return found

    def open(self, candidate: str, alpha: float) -> float:
        """Return the level of a candidate: the one it was given at its first look, or that of the next."""
        entries = self.entries()
        known = entries.get((candidate, *self.asked))
        return levels([entry.answer == ACCEPT for entry in entries.values()], alpha) if known is None else known.alpha

    def write(self, candidate: str, decision: Decision) -> None:
        """Add an answer; one that repeats the last is not written again."""
        known = self.entries().get((candidate, *self.asked))
        if known is None or known.answer != decision.answer:
            metric, baseline = self.asked
            record = {"candidate": candidate, "metric": metric, "baseline": baseline, "alpha": decision.rule.alpha}
            append_line(self.path, record | {"answer": decision.answer, "pairs": decision.pairs, "mean": decision.mean})

    def best(self) -> str:
        """Return the sentence about accepted candidates, which were chosen for being high."""
        accepted = [entry.candidate for entry in self.entries().values() if entry.answer == ACCEPT]
        undone = sum(entry.answer == GO_ON for entry in self.entries().values())
        told = f"{len(accepted)} of {len(self.entries())} candidates accepted"
        if undone:
            told += f", {undone} still open"
        if not accepted:
            return told
        return (
            f"{told}; the last is {accepted[-1]}. Its estimate is too high, as it was chosen for it: run it again on "
            "fresh seeds before you call it the best"
        )
