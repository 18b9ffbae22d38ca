"""The ledger of decisions: over a sequence of candidates the rate of false discoveries is held online.

LORD++ (Ramdas, Yang, Wainwright and Jordan 2017, arXiv 1710.00499): candidate t is tested at

    α_t = γ_t·w₀ + (α - w₀)·γ_(t-τ₁) + α·Σ_(j≥2) γ_(t-τ_j),   γ_t = 0.0772·log(max(t, 2)) / (t·exp(√log t))

with the candidates τ_j that were accepted before and w₀ = α/2. The share of accepted candidates that are no better is
then at most α on average, for independent candidates. A level is given to a candidate when it is first looked at, and
stays. The p-value is 1 / (largest e-value), which looking does not spoil.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from headwise.files.durable import append_line, read_lines
from headwise.judging.decision import ACCEPT, GO_ON, Decision


@dataclass(frozen=True)
class Entry:
    """One candidate: the level at which it is tested, and its answer so far."""

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
    return 0.07720838 * math.log(max(t, 2)) / (t * math.exp(math.sqrt(math.log(t))))


class Ledger:
    """A file of JSON lines: the level of each candidate when it is first looked at, and each answer."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> dict[str, Entry]:
        """Return the candidates in the order in which they were first looked at, with their last answers."""
        found: dict[str, Entry] = {}
        for line in read_lines(self.path) if self.path.exists() else []:
            known = found.get(line["candidate"])
            level = float(line["alpha"]) if known is None else known.alpha
            found[line["candidate"]] = Entry(line["candidate"], level, line["answer"])
        return found

    def open(self, candidate: str, alpha: float) -> float:
        """Return the level of a candidate: the one it was given at its first look, or that of the next."""
        entries = self.entries()
        if candidate in entries:
            return entries[candidate].alpha
        return levels([entry.answer == ACCEPT for entry in entries.values()], alpha)

    def write(self, candidate: str, decision: Decision) -> None:
        """Add an answer; one that repeats the last is not written again."""
        known = self.entries().get(candidate)
        if known is None or known.answer != decision.answer:
            record = {"candidate": candidate, "alpha": decision.rule.alpha, "answer": decision.answer}
            append_line(self.path, json.loads(json.dumps(record | {"pairs": decision.pairs, "mean": decision.mean})))

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
