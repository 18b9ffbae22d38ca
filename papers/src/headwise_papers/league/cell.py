"""One entry in one world: its search on validation data, then its final seeds on test data, run one after another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headwise.lab.comparing.compare import describe
from headwise.lab.comparing.comparison import Comparison, Engine, Listener
from headwise.lab.comparing.plan import check_arms
from headwise.lab.comparing.tune import RATE, Choice, Search
from headwise.lab.experiments.arm import read_arm
from headwise.lab.experiments.configuration import BASELINE
from headwise.lab.experiments.study import Study
from headwise.lab.experiments.task import Task
from headwise.lab.experiments.task_source import source_digest, source_file
from headwise.lab.training.job import Order
from headwise.lab.training.phases import part_of
from headwise.lab.training.rehearsal import try_arm
from headwise_papers.league import world_folder
from headwise_papers.league.files import Entry, World
from headwise_papers.league.space import Declared
from headwise_papers.league.world_folder import EntryRecord, LeagueRecord, Tried
from headwise_verdict.files.durable import write_json
from headwise_verdict.files.errors import StudyError, is_for_users
from headwise_verdict.files.ownership import REPORT, STUDY, claim
from headwise_verdict.results.folder import sealed_study
from headwise_verdict.results.records import RunResult

if TYPE_CHECKING:
    from optuna.storages import BaseStorage


class Place:
    """One world in its folder: its record, the study of all entries so far, and the journal of their trials."""

    def __init__(
        self,
        world: World,
        folder: Path,
        engine: Engine,
        listener: Listener,
        *,
        trials: int,
        seeds: int,
        command: str,
        data: Path | None,
        device: str = "cpu",
        first_seed: int = 0,
        record: LeagueRecord | None = None,
    ) -> None:
        self.world, self.folder, self.first_seed = world, folder, first_seed
        self.task: Task = world.built().located(data)
        study = Study(
            name=f"league-{world.name}",
            title=world.title,
            question=f"Which entry of the league helps where the plain model suffers from {world.symptom}?",
            task=self.task,
            task_place=world.task,
            methods=(),
            seeds=seeds,
            device=device,
            margin=world.margin,
            notes=(world.reason,),
        )
        self.comparison = Comparison(study, self.folder, engine, listener, data=data, trials=trials, command=command)
        world_folder.check_seeds(self.folder, self.seeds)
        file = source_file(world.task)
        self.record = world_folder.begin(
            self.folder, world, self.task.model_dump(mode="json"), trials, source_digest(file) if file else None, record
        )
        self._storage: BaseStorage | None = None

    def beside(self, name: str, first_seed: int) -> Place:
        """Return the same world in a subfolder of this one, with final seeds from `first_seed` on."""
        base = self.comparison
        return Place(
            self.world,
            self.folder / name,
            base.engine,
            base.listener,
            trials=base.trials,
            seeds=self.study.seeds,
            command=base.command,
            data=base.data,
            device=self.study.device,
            first_seed=first_seed,
        )

    @property
    def seeds(self) -> range:
        """Return the seeds of the final runs."""
        return range(self.first_seed, self.first_seed + self.study.seeds)

    @property
    def study(self) -> Study:
        """Return the study, without the arms that searches chose."""
        return self.comparison.study

    def claim(self) -> None:
        """Make the folder, and record that it is a league's; raise StudyError if it holds anything else."""
        claim(self.folder.parent, (self.folder.name,), shared=True)
        claim(self.folder, (world_folder.FILE, world_folder.STEP_TIMES, *STUDY, *REPORT))

    @property
    def storage(self) -> BaseStorage:
        """Return the journal of all searches of this world."""
        if self._storage is None:
            import optuna
            from optuna.storages.journal import JournalFileBackend

            optuna.logging.set_verbosity(optuna.logging.WARNING)
            self.claim()
            backend = JournalFileBackend(str(self.folder / "tuning.journal"))
            self._storage = optuna.storages.JournalStorage(backend)
        return self._storage

    def order(self, chosen: Choice, seed: int) -> Order:
        """Return the order of one final run at a choice."""
        return self.comparison.order(self.study.configuration(chosen.label, seed, settings={RATE: chosen.rate}))

    def orders(self, chosen: Choice) -> list[Order]:
        """Return the orders of all final runs at a choice."""
        return [self.order(chosen, seed) for seed in self.seeds]

    def put(self, name: str, record: EntryRecord) -> None:
        """Store the state of an entry in league.json."""
        self.record = self.record.model_copy(update={"entries": {**self.record.entries, name: record}})
        world_folder.write(self.folder, self.record)

    def write_study(self) -> None:
        """Write study.json with the arms chosen so far, if the search of the plain model has ended."""
        ready = [one for one in self.record.entries.values() if one.status == "chosen" and one.rate is not None]
        ready.sort(key=lambda one: one.chosen != BASELINE)
        if not ready or ready[0].chosen != BASELINE:
            return
        choices = [Choice(one.chosen, one.rate) for one in ready if one.rate is not None]
        orders = [self.order(choice, seed) for seed in self.seeds for choice in choices]
        study = self.study.model_copy(update={"methods": tuple(choice.label for choice in choices[1:])})
        comparison = Comparison(
            study,
            self.folder,
            self.comparison.engine,
            self.comparison.listener,
            data=self.comparison.data,
            trials=self.comparison.trials,
            command=self.comparison.command,
        )
        notes = [f"{one.arm}: chosen on validation as {one.chosen}, learning rate {one.rate:g}." for one in ready]
        described = describe(comparison, orders, [*self.study.notes, *notes]).model_copy(
            update={"seeds": list(self.seeds)}
        )
        world_folder.write(self.folder, self.record)
        write_json(self.folder / "study.json", sealed_study(described).model_dump(mode="json"))


class Cell:
    """One entry in one world: it yields the next run and records the results."""

    def __init__(self, entry: Entry, place: Place, *, again: bool = False) -> None:
        self.entry, self.place = entry, place
        digest = world_folder.digest_of(entry, place.comparison.trials)
        fresh = EntryRecord(kind=entry.kind, arm=entry.arm, digest=digest)
        stored = place.record.entries.get(entry.name)
        is_same = stored is not None and stored.digest == digest and not (again and stored.over)
        # the kind is no part of the search, so that it may be corrected
        self.record = stored.model_copy(update={"kind": entry.kind}) if stored is not None and is_same else fresh
        if self.record.kind != getattr(stored, "kind", self.record.kind):
            place.record = place.record.model_copy(
                update={"entries": {**place.record.entries, entry.name: self.record}}
            )
        self._search: Search | None = None

    @property
    def name(self) -> str:
        """Return the cell's name in words."""
        return f"{self.entry.name} in {self.place.world.name}"

    @property
    def choice(self) -> Choice | None:
        """Return what the search chose, or None before it has ended."""
        if self.record.status != "chosen" or self.record.rate is None:
            return None
        return Choice(self.record.chosen, self.record.rate)

    def trials_done(self) -> int:
        """Return the number of recorded trials."""
        return len(self.record.tried)

    def finals(self) -> list[RunResult]:
        """Return the results of the finished final runs."""
        choice = self.choice
        results = [order.result() for order in self.place.orders(choice)] if choice else []
        return [result for result in results if result is not None]

    def next_order(self, upto: int) -> Order | None:
        """Return the next run: a trial, then a final seed below `upto`; None if nothing is left to do.

        An entry that the world's model does not support is recorded as refused.
        """
        if self.record.over:
            return None
        if self.choice is None:
            order = self._next_trial()
            if order is not None or self.record.over:
                return order
        choice = self.choice
        assert choice is not None, "a search that gives no further trial has chosen"
        missing = (order for order in self.place.orders(choice)[:upto] if order.result() is None)
        return next(missing, None)

    def tell(self, order: Order, result: RunResult) -> None:
        """Record the result of a run."""
        if order.configuration.purpose == "trial":
            assert self._search is not None
            self._search.tell(result)
            self._record_trials(self._search)

    def fail(self, why: str) -> None:
        """Record that a run of this entry ended with an error, which is the entry's result in this world."""
        self.note(status="failed", why=" ".join(why.split()) or "no reason was given")

    def _next_trial(self) -> Order | None:
        search = self._search = self._search or self._begin()
        if search is None:
            return None
        order = search.next_order()
        # results of trials that finished before an interruption but were not recorded
        while order is not None and (result := order.result()) is not None:
            search.tell(result)
            order = search.next_order()
        self._record_trials(search)
        if order is None:
            self._choose(search)
        elif not self.record.tried and (why := _why_refused(order)):
            self.note(status="refused", why=why)
            return None
        return order

    def _begin(self) -> Search | None:
        task = self.place.task
        try:
            space, arm = Declared(self.entry, task), read_arm(self.entry.arm, task)
            check_arms((arm,), task)
        except StudyError as error:
            self.note(status="refused", why=str(error).splitlines()[0])
            return None
        return Search(self.place.comparison, self.place.storage, arm.text, space)

    def _record_trials(self, search: Search) -> None:
        tried = tuple(Tried(arm=choice.label, rate=choice.rate, value=value) for choice, value in search.tried())
        if tried != self.record.tried:
            self.note(tried=tried)

    def _choose(self, search: Search) -> None:
        choice, _ = search.best()
        taken = {
            one.chosen: name
            for name, one in self.place.record.entries.items()
            if name != self.entry.name and one.status == "chosen"
        }
        if choice.label in taken:
            why = (
                f"its search chose {choice.label}, which {taken[choice.label]} chose too: give them ranges without a "
                "common point"
            )
            self.note(status="failed", why=why)
            return
        value = next(
            (one.value for one in self.record.tried if (one.arm, one.rate) == (choice.label, choice.rate)), None
        )
        self.note(status="chosen", chosen=choice.label, rate=choice.rate, validation=value)

    def note(self, **changes: object) -> None:
        """Change the record of this cell, and store it."""
        self.record = self.record.model_copy(update=changes)
        self.place.claim()
        self.place.put(self.entry.name, self.record)


def _why_refused(order: Order) -> str:
    """Return why the world's model does not support the methods of a trial; "" if it does."""
    part = part_of(order.task(), 0)
    if not part.phase.methods:
        return ""
    try:
        try_arm(part, order.configuration, torch.device(order.device), trains=False)
    except Exception as error:
        if not is_for_users(error):
            raise
        return " ".join(str(error).split())
    return ""
