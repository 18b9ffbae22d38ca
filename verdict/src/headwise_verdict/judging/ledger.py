"""The ledger of decisions: over a sequence of candidates the rate of false discoveries is held online.

LORD++ (Ramdas, Yang, Wainwright and Jordan 2017, arXiv 1710.00499): candidate t is tested at

    α_t = γ_t·w₀ + (α - w₀)·γ_(t-τ₁) + α·Σ_(j≥2) γ_(t-τ_j),   γ_t = t^(-1.3) / ζ(1.3)

with the candidates τ_j that were accepted before and w₀ = α/2. Any γ that sums to 1 is allowed; up to some 800
candidates this one gives each a higher level than that of the paper. The share of accepted candidates that are no
better is then at most α on average, for independent candidates. A level is given to a candidate when it is first looked
at, and stays. The p-value is 1 / (largest e-value), which looking does not spoil. A candidate that is judged by another
metric, against another baseline or in another script is another entry: each question has its own chance of a false
answer.

Each line carries the SHA-256 of itself and of the line before it, so that a line that is edited, deleted or moved
breaks the chain. A later look at a candidate is compared with what its earlier lines say of the same runs.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from headwise_verdict.files.durable import append_lines, lines_of
from headwise_verdict.files.errors import StudyError
from headwise_verdict.judging.decision import ACCEPT, GO_ON, Decision, Rule

# what an entry is about
QUESTION = ("candidate", "metric", "baseline")
FIELDS: dict[str, Any] = dict.fromkeys(QUESTION, str) | {
    "alpha": float,
    "answer": str,
    "pairs": int,
    "mean": float,
    "margin": float,
}
# what lines may lack that were written before there was such a thing
LATER: dict[str, Any] = {"script": "", "bound": None, "of": None}
# a mean that differs from the recorded one by less, in proportion, has only been rounded
ROUNDED = 1e-9


@dataclass(frozen=True)
class Look:
    """What an earlier look found: the mean difference over the first pairs, with the margin and bound of its rule."""

    pairs: int
    mean: float
    margin: float
    bound: float | None


@dataclass(frozen=True)
class Entry:
    """One question: the level at which it is tested, its answer so far, and its looks."""

    candidate: str
    alpha: float
    answer: str
    looks: tuple[Look, ...] = ()

    def doubts(self, decision: Decision) -> list[str]:
        """Return how a new look contradicts earlier ones: other runs, or another margin."""
        found = []
        for look in self.looks:
            mean = decision.means[look.pairs - 1] if look.pairs <= len(decision.means) else None
            if mean is None or not math.isclose(mean, look.mean, rel_tol=ROUNDED, abs_tol=1e-300):
                now = f"there are {decision.pairs}" if mean is None else f"now {mean:.4g}"
                found.append(
                    f"an earlier look had {look.pairs} pairs with a mean of {look.mean:.4g}, {now}: runs were left "
                    "out, replaced or reordered, and alpha no longer holds. Restore them, or give another change "
                    "another name"
                )
                break
        for name in ("margin", "bound"):
            now = getattr(decision.rule, name)
            before = dict.fromkeys(_told(then) for look in self.looks if (then := getattr(look, name)) != now)
            if before:
                found.append(
                    f"the {name} was {', '.join(before)} at an earlier look, and is {_told(now)} now: alpha no longer "
                    "holds"
                )
        return found


def _told(number: float | None) -> str:
    return "none" if number is None else f"{number:g}"


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


def _chained(record: dict[str, Any], before: str) -> str:
    return hashlib.sha256((before + json.dumps(record, sort_keys=True)).encode()).hexdigest()


class Ledger:
    """A file of JSON lines: the level of each candidate when it is first looked at, and each answer.

    Args:
        path: of the file; it is made at the first answer.
        metric, baseline: by which and against which candidates are judged.
        script: the command whose runs are judged; "": those of a table, or of a loop in Python.
    """

    def __init__(self, path: Path, metric: str, baseline: str, script: str = "") -> None:
        self.path, self.asked = path, (metric, baseline, script)

    def judged(
        self, candidate: str, rule: Rule, decide: Callable[[Rule], Decision], *, trains: bool = False
    ) -> Decision:
        """Return the decision about a candidate at its level, with notes on it and on the ledger, and keep it.

        Args:
            candidate: its name.
            rule: whose alpha is that of the ledger.
            decide: returns the decision by the rule that it is given.
            trains: whether `decide` trains: the level is then written before, and others need not wait.
        """
        with self.held():
            own = replace(rule, alpha=self.open(candidate, rule.alpha))
            if not trains:
                return self._entered(candidate, rule, decide(own))
            self.reserve(candidate, own, rule.alpha)
        decision = decide(own)
        with self.held():
            return self._entered(candidate, rule, decision)

    def _entered(self, candidate: str, rule: Rule, decision: Decision) -> Decision:
        others = {of for record in self._records() if (of := record["of"]) not in (None, rule.alpha)}
        doubts = self.write(candidate, decision, rule.alpha)
        if others:
            before = ", ".join(f"{of:g}" for of in sorted(others))
            doubts.append(
                f"alpha was {before} for earlier entries: the ledger holds the false discoveries below the largest "
                "alpha only"
            )
        return decision.noted(*doubts, f"level {decision.rule.alpha:.2g} of {rule.alpha:g}", self.best())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes waiting from the level to the answer: two candidates may not get one place."""
        with FileLock(self.path.with_name(f".{self.path.name}.lock")):
            yield

    def entries(self) -> dict[tuple[str, ...], Entry]:
        """Return the questions in the order in which they were first asked, with their last answers and their looks.

        Raises:
            StudyError: if a line is not one of a ledger, or was edited, deleted or moved.
        """
        found: dict[tuple[str, ...], Entry] = {}
        for record in self._records():
            question = tuple(str(record[name]) for name in (*QUESTION, "script"))
            entry = found.get(question, Entry(question[0], float(record["alpha"]), ""))
            bound = None if record["bound"] is None else float(record["bound"])
            look = Look(int(record["pairs"]), float(record["mean"]), float(record["margin"]), bound)
            looks = (*entry.looks, look) if look.pairs else entry.looks
            found[question] = Entry(entry.candidate, entry.alpha, str(record["answer"]), looks)
        return found

    def _records(self) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.exists() else ""
        before = ""
        for number, line in enumerate(lines_of(text), 1):
            try:
                record = json.loads(line)
                digest = record.pop("digest")
                for name, kind in FIELDS.items():
                    kind(record[name])
                for name in ("bound", "of"):
                    float(record.get(name) or 0)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                raise StudyError(
                    f"{self.path}, line {number}, is no line of a ledger. Restore it, or delete it if it was cut off."
                ) from None
            if digest != _chained(record, before):
                raise StudyError(
                    f"{self.path}, line {number}, was edited, or lines before it were deleted or moved: the levels "
                    "that follow from it prove nothing. Restore the file."
                )
            before = digest
            records.append(LATER | record | {"digest": digest})
        return records

    def open(self, candidate: str, alpha: float) -> float:
        """Return the level of a candidate: the one it was given at its first look, or that of the next."""
        entries = self.entries()
        known = entries.get((candidate, *self.asked))
        return levels([entry.answer == ACCEPT for entry in entries.values()], alpha) if known is None else known.alpha

    def reserve(self, candidate: str, rule: Rule, of: float) -> None:
        """Write the place and the level of a candidate that is not in the ledger, before it has runs."""
        if (candidate, *self.asked) not in self.entries():
            self._append(candidate, rule, {"of": of, "answer": GO_ON, "pairs": 0, "mean": 0.0})

    def write(self, candidate: str, decision: Decision, of: float) -> list[str]:
        """Add an answer and return how it contradicts earlier looks; one look is written once, and none that doubts."""
        known = self.entries().get((candidate, *self.asked))
        doubts = [] if known is None else known.doubts(decision)
        look = Look(decision.pairs, decision.mean, decision.rule.margin, decision.rule.bound)
        if known is None or known.answer != decision.answer or (look not in known.looks and not doubts):
            found = {"of": of, "answer": decision.answer, "pairs": decision.pairs, "mean": decision.mean}
            self._append(candidate, decision.rule, found)
        return doubts

    def _append(self, candidate: str, rule: Rule, found: dict[str, Any]) -> None:
        record: dict[str, Any] = dict(zip((*QUESTION, "script"), (candidate, *self.asked)))
        record |= {"alpha": rule.alpha, "margin": rule.margin, "bound": rule.bound} | found
        before = self._records()
        append_lines(self.path, [record | {"digest": _chained(record, before[-1]["digest"] if before else "")}])

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
