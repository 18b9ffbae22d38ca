"""Tuning: every arm, including the baseline, gets the same number of trials, judged on validation only.

An arm's trials search its learning rate and, for methods, the strength of each (the setting that may change while
training, else the first field), all within a factor of four of the written value. The first trial uses the written
settings. Trials of one arm run one after the other, arms run side by side, so that the number of jobs changes nothing.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headwise.lab.comparing.comparison import Comparison
from headwise.lab.comparing.order_queue import run_orders
from headwise.lab.experiments.arm import Arm
from headwise.lab.experiments.configuration import RATES, RunConfiguration, derive
from headwise.lab.experiments.evaluation import Metric
from headwise.lab.experiments.script import Script
from headwise.lab.experiments.subject import Subject
from headwise.lab.experiments.task import Task
from headwise.lab.training.job import Order
from headwise_verdict import StudyError
from headwise_verdict.files import count
from headwise_verdict.results import RunResult

if TYPE_CHECKING:
    import optuna
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial, Trial

    from headwise.attend import Method

FACTOR = 4.0
# different from the seeds of the final runs, and the same for all trials, so that arms are compared on equal draws
TRIAL_SEED = 1_000_000
RATE = "learning_rate"


@dataclass(frozen=True)
class Choice:
    """A point of an arm's search: the learning rate, and the arm's text at the chosen strengths."""

    label: str
    rate: float


class SearchFactors:
    """A search space of factors for the learning rate and the strengths of an arm's methods."""

    def __init__(self, arm: Arm, task: Subject) -> None:
        self._arm, self._task = arm, task
        self._rate_name, self._rate = rate_of(arm.task(task))

    def first(self) -> dict[str, Any]:
        """Return the factor 1 for everything that is searched."""
        return dict.fromkeys(self._ranges(), 1.0)

    def ask(self, trial: Trial) -> dict[str, Any]:
        """Return the factors that a trial suggests."""
        return {name: trial.suggest_float(name, 1 / FACTOR, high, log=True) for name, high in self._ranges().items()}

    def choice(self, point: dict[str, Any]) -> Choice:
        """Return the arm at these factors."""
        methods = list(self._arm.methods)
        for index, name in searched(self._arm):
            factor = point[_key(index, methods[index])]
            methods[index] = methods[index].replace(**{name: rounded(getattr(methods[index], name) * factor)})
        rate = rounded(self._rate * point[RATE])
        chosen = dataclasses.replace(self._arm, methods=tuple(methods))
        if self._rate_name in dict(self._arm.changes):
            chosen = chosen.changed(self._task, **{self._rate_name: rate})
        return Choice(chosen.text, rate)

    def _ranges(self) -> dict[str, float]:
        """Return the largest factor of each searched setting; a method may refuse four times its strength."""
        ranges = {RATE: FACTOR}
        for index, name in searched(self._arm):
            method = self._arm.methods[index]
            ranges[_key(index, method)] = _highest(method, name)
        return ranges


class Search:
    """A search over the settings of one arm, one trial after the other, in a journal that survives a stop.

    `rate_name` is the setting that is the learning rate.
    """

    def __init__(self, comparison: Comparison, storage: BaseStorage, text: str) -> None:
        self.text, self._comparison, self._storage = text, comparison, storage
        task = comparison.study.task
        arm = comparison.study.arm(text)
        self._space = SearchFactors(arm, task)
        self.rate_name, rate = rate_of(arm.task(task))
        # another task, other data or other settings make another search
        self._name = f"{text} {self._configuration(Choice(text, rate)).identity}"
        self._pending: int | None = None
        if not self._open().get_trials(deepcopy=False):
            self._open().enqueue_trial(self._space.first())

    @property
    def finished(self) -> int:
        """Return the number of finished trials of the budget."""
        return sum(trial.state.is_finished() for trial in self._budget())

    def next_order(self) -> Order | None:
        """Return the order of the next trial: an interrupted one, else a new one; None if the budget is used."""
        from optuna.trial import Trial, TrialState

        from headwise.borders import trial_id

        if self.finished >= self._comparison.trials:
            return None
        study = self._open()
        under_way = [trial for trial in self._budget() if trial.state == TrialState.RUNNING]
        trial = Trial(study, trial_id(under_way[0])) if under_way else study.ask()
        self._pending = trial.number
        return self._comparison.order(self._configuration(self._space.choice(self._space.ask(trial))), "trials")

    def tell(self, result: RunResult) -> None:
        """Record the validation result of a trial; a diverged trial counts as the worst."""
        name = f"validation/{self._metric.name}"
        failed = result.status == "diverged"
        if not failed and name not in result.metrics:
            raise StudyError(
                f"tuning needs {name}, which no evaluation gives. Add an Evaluation('validation', ...) that gives it "
                f"to the evaluations of {type(self._comparison.study.task).__name__}."
            )
        value = result.metrics.get(name)
        failed = failed or value is None or not math.isfinite(value)
        assert self._pending is not None, "a result belongs to the last order"
        self._open().tell(self._pending, self._worst if failed else value)

    def best(self) -> tuple[Choice, str]:
        """Return the best trial's choice within the budget, the first of equals, and a note on the trials."""
        finished = [trial for trial in self._budget() if trial.state.is_finished()]
        values = [self._worst if trial.value is None else trial.value for trial in finished]
        index = values.index(min(values) if self._worst > 0 else max(values))
        choice, trials = self._space.choice(finished[index].params), count(len(finished), "trial")
        diverged = values[index] == self._worst
        how = f"all of {trials} on validation diverged; it stays" if diverged else f"{trials} on validation chose"
        return choice, f"{self.text}: {how} {choice.label} with learning rate {choice.rate:g}."

    @property
    def _worst(self) -> float:
        return -math.inf if self._metric.higher_is_better else math.inf

    @property
    def _metric(self) -> Metric:
        return self._comparison.study.task.all_metrics()[0]

    def _budget(self) -> list[FrozenTrial]:
        # an earlier start may have run more trials: every arm is chosen from the same number
        trials = self._open().get_trials(deepcopy=False)
        return [trial for trial in trials if trial.number < self._comparison.trials]

    def _configuration(self, choice: Choice) -> RunConfiguration:
        return self._comparison.study.configuration(
            choice.label, TRIAL_SEED, settings={self.rate_name: choice.rate}, purpose="trial"
        )

    def _open(self) -> optuna.Study:
        import optuna

        direction: Literal["maximize", "minimize"] = "maximize" if self._metric.higher_is_better else "minimize"
        study = optuna.create_study(
            study_name=self._name, storage=self._storage, direction=direction, load_if_exists=True
        )
        # seeded by the number of trials, so that a resumed search suggests the same points
        known = len(study.get_trials(deepcopy=False))
        study.sampler = optuna.samplers.TPESampler(seed=derive(known, self.text) % 2**32, n_startup_trials=5)
        return study


def tune(comparison: Comparison) -> tuple[list[RunConfiguration], list[str]]:
    """Carry out the trials of all arms; return the final runs at the chosen settings, and a note on each arm."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = comparison.study
    _refuse_twins(list(study.parsed.values()), rate_of(study.task)[0])
    backend = JournalFileBackend(str(comparison.out / "tuning.journal"))
    storage = optuna.storages.JournalStorage(backend)
    arms = [Search(comparison, storage, text) for text in study.arms]
    owner: dict[str, Search] = {}

    def begin(arm: Search) -> Order | None:
        order = arm.next_order()
        if order is not None:
            owner[order.identity] = arm
        return order

    def then(order: Order, result: RunResult) -> Order | None:
        arm = owner[order.identity]
        arm.tell(result)
        return begin(arm)

    finished = sum(arm.finished for arm in arms)
    orders = [order for order in map(begin, arms) if order is not None]
    total, after = comparison.trials * len(arms), len(study.arms) * study.seeds
    run_orders(comparison, orders, then, total=total, finished=finished, after=after)
    chosen = {arm.text: arm.best() for arm in arms}
    names = {arm.text: arm.rate_name for arm in arms}
    final = [
        study.configuration(chosen[text][0].label, seed, settings={names[text]: chosen[text][0].rate})
        for seed in range(study.seeds)
        for text in study.arms
    ]
    return final, [note for _, note in chosen.values()]


def rate_of(subject: Subject) -> tuple[str, float]:
    """Return name and value of a subject's learning rate.

    Raises:
        StudyError: if the command of a script names none, since a trial cannot search an unknown setting.
    """
    if isinstance(subject, Task):
        return RATE, subject.learning_rate
    rate = subject.rate() if isinstance(subject, Script) else None
    if rate is None:
        raise StudyError(
            f"--tune searches the learning rate, and the command of --script names none ({', '.join(RATES[:3])}, ...). "
            'Write it there: --script "python train.py --lr 3e-4".'
        )
    return rate


def searched(arm: Arm) -> list[tuple[int, str]]:
    """Return the strengths that are searched, as (index of the method, field); scheduled ones are not searched."""
    timed = {(index, name) for index, name, _ in arm.timed}
    strengths = [(index, _strength(method)) for index, method in enumerate(arm.methods)]
    return [(index, name) for index, name in strengths if name is not None and (index, name) not in timed]


def _strength(method: Method) -> str | None:
    """Return the field to search: the first that may change while training, else the first; None if it is 0."""
    fields = {field.name: field for field in dataclasses.fields(method)}  # type: ignore[arg-type]
    name = next(iter(method.live or fields), None)
    if name is None or not (name in method.live or "float" in str(fields[name].type)):
        return None
    value = getattr(method, name)
    return name if isinstance(value, (int, float)) and not isinstance(value, bool) and value != 0 else None


def _highest(method: Method, name: str) -> float:
    for factor in (FACTOR, 3.0, 2.0, 1.5, 1.25):
        try:
            method.replace(**{name: rounded(getattr(method, name) * factor)})
        except ValueError:
            continue
        return factor
    return 1.0


def _key(index: int, method: Method) -> str:
    return f"{index} {type(method).__name__}"


def rounded(value: float) -> float:
    """Return the value with three digits: precise enough for a setting, and readable in a label."""
    return float(f"{value:.3g}")


def _refuse_twins(arms: list[Arm], rate: str) -> None:
    """Refuse two arms that differ only in what is searched: tuning could make them equal."""
    seen: dict[str, str] = {}
    for arm in arms:
        strengths = dict(searched(arm))
        methods = [
            (type(method).__name__, {k: v for k, v in method.settings().items() if k != strengths.get(index)})
            for index, method in enumerate(arm.methods)
        ]
        shape = repr((arm.name, methods, arm.timed, arm.where, [c for c in arm.changes if c[0] != rate]))
        if shape in seen:
            raise StudyError(
                f"{seen[shape]} and {arm.text} differ only in what --tune searches, strength and learning rate. "
                "Give one of them, or no --tune."
            )
        seen[shape] = arm.text
