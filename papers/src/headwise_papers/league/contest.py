"""The contest in one world: premises first, then every contestant's search and final runs; it can stop at any run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headwise.lab.comparing.progress import QUIET, clock
from headwise.lab.experiments.task import Task
from headwise_papers.league.brief_run import run_once
from headwise_papers.league.contest_files import PLAIN, Contestant, SmallWorld, rates, why_refused
from headwise_papers.league.rate_search import (
    AGAIN,
    FINAL,
    TUNING,
    Chosen,
    Errors,
    finals,
    search,
    search_again,
    search_eased,
)
from headwise_papers.league.run_ledger import Ledger, Run
from headwise_papers.league.simple_predictors import constant_accuracy, simple_accuracy
from headwise_papers.league.world_premises import SEEDS, Premise, needed, premises
from headwise_verdict.files.errors import StudyError, is_for_users

# the move of the plain model that twice the search may make, in its spread between final seeds
MOVE = 0.25
IDLE = (
    "each run of its search has the plain model's figures. A task that is Small overrides plain_model "
    "instead of model, and does not override loss"
)


@dataclass
class Contest:
    """One world with its runs so far; all that is told of it is computed from them."""

    world: SmallWorld
    contestants: Mapping[str, Contestant]
    ledger: Ledger
    # metric of failure, direction and the errors of simple predictors, measured once
    facts: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, world: SmallWorld, contestants: Mapping[str, Contestant], folder: Path, data: Path | None = None
    ) -> Contest:
        """Return the contest of a world in its folder, with the figures that need its data measured once.

        Raises:
            StudyError: if the folder has another version of the world, or its data cannot be read.
        """
        ledger = Ledger(folder, world.digest(data))
        if not ledger.facts:
            ledger.facts = dict(_facts(world.built(data)))
            ledger.save()
        return cls(world, contestants, ledger, {name: float(str(one)) for name, one in ledger.facts.items()})

    @classmethod
    def kept(cls, world: SmallWorld, contestants: Mapping[str, Contestant], folder: Path) -> Contest:
        """Return the contest as its folder tells it, without code or data."""
        ledger = Ledger(folder)
        return cls(world, contestants, ledger, {name: float(str(one)) for name, one in ledger.facts.items()})

    @property
    def errors(self) -> Errors:
        """Return the errors of all runs so far."""
        return Errors(self.ledger.runs, self.facts["failure"], higher=bool(self.facts["higher"]))

    @property
    def simple(self) -> dict[str, float]:
        """Return the errors of the simple predictors on validation data."""
        return {"a constant": self.facts["constant"], "the simplest learned predictor": self.facts["simple"]}

    def plain(self) -> Chosen | None:
        """Return the plain model's choice; None before its search has ended."""
        found = search(self.world, self.contestants[PLAIN], self.errors)
        return found if isinstance(found, Chosen) else None

    def premises(self) -> list[Premise]:
        """Return the premises; empty before their runs are made."""
        plain = self.plain() if self.ledger.runs else None
        eased = self._eased(plain) if plain else None
        if plain is None or not isinstance(eased, Chosen) or self._missing(needed(self.world, plain, eased.rate)):
            return []
        return premises(self.world, plain, eased.rate, self.errors, self.simple)

    def _eased(self, plain: Chosen) -> list[Run] | Chosen:
        """Return what the plain model chose in the eased world, or the runs that this lacks."""
        return search_eased(self.world, self.errors) if self.world.symptom == "depth" else plain

    def chosen(self) -> dict[str, Chosen]:
        """Return the choices of all contestants whose searches have ended, the plain model's first."""
        found = {
            name: search(self.world, one, self.errors)
            for name, one in self.contestants.items()
            if name not in self.ledger.notes
        }
        return {name: one for name, one in found.items() if isinstance(one, Chosen)}

    def plain_rates(self, repetitions: int = len(AGAIN)) -> list[float]:
        """Return every rate at which the plain model has final runs or needs them.

        They are its own, the usual one, all that contestants chose, and those of the first `repetitions` of its search.
        """
        own = [one.rate for one in self.chosen().values()]
        again = [one.rate for one in self.again()[:repetitions]]
        return list(dict.fromkeys([*own, self.world.usual_rate, *again]))

    def again(self) -> list[Chosen]:
        """Return what the repetitions of the plain model's search chose, as far as they have ended."""
        found = (search_again(self.world, self.errors, at) for at in range(len(AGAIN)))
        return [one for one in found if isinstance(one, Chosen)]

    def left(self) -> Iterator[Run]:
        """Yield the next missing run, again and again, as their results come in; StopIteration if none is left.

        Raises:
            StudyError: if every final run of the plain model has diverged, which leaves nothing to compare with.
        """
        while (run := self._next()) is not None:
            yield run

    def _next(self) -> Run | None:
        plain = search(self.world, self.contestants[PLAIN], self.errors)
        if isinstance(plain, list):
            return plain[0]
        eased = self._eased(plain)
        if isinstance(eased, list):
            return eased[0]
        if missing := self._missing(needed(self.world, plain, eased.rate)):
            return missing[0]
        if not all(one.holds for one in self.premises()):
            return None
        if missing := self._missing(finals(plain)):
            return missing[0]
        if all(self.ledger.runs[run].test is None for run in finals(plain)):
            raise StudyError(
                f"world {self.world.name}: every final run of the plain model diverged, so there is nothing to "
                "compare with. Check its targets, and its usual_rate."
            )
        for name, one in self.contestants.items():
            if name in self.ledger.notes:
                continue
            found = search(self.world, one, self.errors)
            if isinstance(found, list):
                return found[0]
            if missing := self._missing(finals(found)):
                return missing[0]
        if missing := self._missing(self._plain_finals(0)):
            return missing[0]
        for at in range(len(AGAIN)):
            again = search_again(self.world, self.errors, at)
            if isinstance(again, list):
                return again[0]
            if missing := self._missing(self._plain_finals(at + 1)):
                return missing[0]
            if self.move(at) <= MOVE:
                break
        return None

    def runs_left(self) -> int:
        """Return about how many runs are missing: a search that has not ended counts as one of the usual length."""
        told, runs = self.premises(), self.ledger.runs
        if told and not all(one.holds for one in told):
            return 0
        known, usual = set[Run](), 0
        for name, one in self.contestants.items():
            found = search(self.world, one, self.errors) if runs and name not in self.ledger.notes else []
            if isinstance(found, Chosen):
                known.update(self._missing(finals(found)))
            elif name not in self.ledger.notes:
                made = sum(run.arm in one.arms and run.seed in TUNING and not run.eased for run in runs)
                usual += max(len(found), _searched(self.world, one) - made) + len(FINAL)
        if not told:
            usual += max(0, 2 * len(SEEDS) - sum(run.seed in SEEDS for run in runs))
        again = self.again() if runs else []
        if not again:
            grid = rates(self.world, halved=True)
            usual += max(0, len(TUNING) * len(grid) - sum(run.seed in AGAIN[0] for run in runs))
        if told:
            known.update(self._missing(self._plain_finals(len(again))))
        return len(known) + usual

    def _plain_finals(self, repetitions: int) -> list[Run]:
        return [Run("baseline", rate, seed) for rate in self.plain_rates(repetitions) for seed in FINAL]

    def _missing(self, runs: list[Run]) -> list[Run]:
        return [run for run in runs if run not in self.ledger.runs]

    def contestant_of(self, run: Run) -> str:
        """Return the name of the contestant that a run belongs to."""
        return next(name for name, one in self.contestants.items() if run.arm in one.arms)

    def stage_of(self, run: Run) -> str:
        """Return what a run is for, in words: a contestant, the premises, or the plain model's search again."""
        if run.seed in SEEDS:
            return "premises"
        return "plain again" if any(run.seed in seeds for seeds in AGAIN) else self.contestant_of(run)

    @property
    def state(self) -> str:
        """Return "not run", "under way", "failed" (a premise does not hold) or "complete"."""
        if not self.ledger.runs:
            return "not run"
        told = self.premises()
        if told and not all(one.holds for one in told):
            return "failed"
        return "under way" if not told or self._next() is not None else "complete"

    def is_idle(self, name: str) -> bool:
        """Return whether each run of a contestant's search, all its arms among them, has the plain model's figures.

        Its setting then changes nothing in this task, for example because the task writes its own `model` or `loss`.
        """
        runs, arms = self.ledger.runs, self.contestants[name].arms
        own = [run for run in runs if run.arm in arms and run.seed in TUNING and not run.eased]
        pairs = [(runs[run], runs.get(Run("baseline", run.rate, run.seed))) for run in own]
        searched = (
            name != PLAIN and {run.arm for run in own} == set(arms) and len(own) >= len(TUNING) * len(rates(self.world))
        )
        return searched and all(b and (a.train, a.validation) == (b.train, b.validation) for a, b in pairs)

    def diverged(self) -> bool:
        """Return whether every run of the plain model so far has diverged."""
        return bool(self.ledger.runs) and all(
            one.diverged for run, one in self.ledger.runs.items() if run.arm == "baseline"
        )

    def final_errors(self, arm: str, rate: float) -> list[float]:
        """Return the test errors of an arm at a rate, by final seed."""
        found = [self.errors.of(Run(arm, rate, seed), "test") for seed in FINAL]
        return [one for one in found if one is not None]

    def best_plain(self, repetitions: int = len(AGAIN)) -> float:
        """Return the rate of the best plain model there is, by its mean test error on the final seeds.

        Taking the best on test data favours the plain model: no contestant gains by its rate.
        """
        rates = self.plain_rates(repetitions)
        return min(rates, key=lambda rate: statistics.fmean(self.final_errors("baseline", rate)))

    def move(self, repetition: int | None = None) -> float:
        """Return by how much a repetition of the search, the last by default, betters the best plain model before it.

        The unit is the plain model's standard deviation between final seeds.
        """
        at = len(self.again()) - 1 if repetition is None else repetition
        before = self.final_errors("baseline", self.best_plain(at))
        after = self.final_errors("baseline", self.best_plain(at + 1))
        spread = statistics.stdev(before)
        gain = statistics.fmean(before) - statistics.fmean(after)
        return gain / spread if spread else float(gain > 0) * float("inf")


def _searched(world: SmallWorld, one: Contestant) -> int:
    """Return how many runs the search of a contestant has whose best rate is inside the grid."""
    return len(TUNING) * (len(rates(world, wide=one.reparametrizes)) + len(one.arms) - 1)


class Progress:
    """Lines that tell where a world is: one at the first run of each stage, and one where 30 seconds had none."""

    def __init__(self, contest: Contest, tell: Callable[[str], None]) -> None:
        self._contest, self._tell = contest, tell
        self._began = self._told = time.monotonic()
        self._made, self._stage = 0, ""

    def count(self) -> None:
        """Count a run that was made."""
        self._made += 1

    def next(self, run: Run) -> None:
        """Tell, if it is time, what comes next, and how much is left."""
        now, stage = time.monotonic(), self._contest.stage_of(run)
        if stage == self._stage and now - self._told < QUIET:
            return
        self._stage, self._told = stage, now
        done, left = len(self._contest.ledger.runs), self._contest.runs_left()
        each = (now - self._began) / self._made if self._made else self._contest.world.seconds
        about = clock(left * each)
        self._tell(f"{self._contest.world.name}: runs {done}/{done + left}, now {stage}, about {about} left")


def carry_out(
    contest: Contest,
    data: Path | None,
    tell: Callable[[str], None],
    is_over: Callable[[], bool] = lambda: False,
    device: str = "cpu",
) -> None:
    """Make the missing runs of a world until none is left or `is_over`.

    A contestant that the world refuses, or whose run ends with an error, is noted with the reason and left out.

    Raises:
        StudyError: if the plain model cannot be trained, or all its final runs diverge.
    """
    own, eased = contest.world.built(data), contest.world.built(data, eased=True)
    for name, one in contest.contestants.items():
        if name not in contest.ledger.notes and (why := why_refused(one, own)):
            contest.ledger.note(name, f"refused: {why}")
    progress = Progress(contest, tell)
    for run in contest.left():
        if is_over():
            break
        progress.next(run)
        try:
            figures = run_once(
                eased if run.eased else own, run.arm, run.rate, run.seed, reads_test=run.seed in FINAL, device=device
            )
        except Exception as error:
            name = contest.contestant_of(run)
            if name == PLAIN:
                raise
            kind = "refused" if is_for_users(error) else f"failed: {type(error).__name__}"
            contest.ledger.note(name, f"{kind}: {error}")
            tell(f"{contest.world.name}: {name} {contest.ledger.notes[name]}")
            continue
        contest.ledger.add(run, figures)
        if run.seed == FINAL[0] and contest.is_idle(name := contest.contestant_of(run)):
            tell(f"{contest.world.name}: {name} changes nothing here: {IDLE}")
        progress.count()
    all_lost = ". Every run of the plain model diverged: check its targets and its loss" if contest.diverged() else ""
    tell(f"{contest.world.name}: {contest.state}, {len(contest.ledger.runs)} runs{all_lost}")


def _facts(task: Task) -> dict[str, float]:
    """Return the metric of failure, whether higher is better, and the validation errors of simple predictors."""
    metric = task.all_metrics()[0]
    train, validation = task.data("train"), task.data("validation")
    if metric.failure is None:
        raise StudyError(f"{type(task).__name__} does not tell what a diverged run counts as: set failure.")
    if task.train_size is not None:
        # the first of a fixed shuffle: as many examples as a run sees
        import torch

        order = torch.randperm(len(train[1]), generator=torch.Generator().manual_seed(0))[: task.train_size]
        train = (train[0][order], train[1][order])
    own = getattr(task, "simple_accuracy", None)
    simple = own(train, validation) if own else simple_accuracy(train, validation)
    return {
        "failure": metric.failure,
        "higher": float(metric.higher_is_better is not False),
        "constant": 1 - constant_accuracy(train[1], validation[1]),
        "simple": 1 - simple,
    }
