"""One run of a league, in memory: a run of a second is repeated, not resumed, so it writes no checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from time import process_time

from headwise.lab.experiments.arm import read_arm
from headwise.lab.experiments.configuration import RunConfiguration
from headwise.lab.experiments.task import Task
from headwise.lab.training.batches import move
from headwise.lab.training.evaluate import evaluate
from headwise.lab.training.execution import accelerator_of, prepare
from headwise.lab.training.job import Order
from headwise.lab.training.phases import part_of
from headwise.lab.training.preflight import evaluations_of
from headwise.lab.training.splits import held_out_examples, training_examples
from headwise.lab.training.train import train_epoch


@dataclass(frozen=True)
class Figures:
    """The deciding metric of one run on each split; None: a search does not see the test, or the run diverged."""

    train: float | None
    validation: float | None
    test: float | None
    seconds: float

    @property
    def diverged(self) -> bool:
        """Return whether the run has no figure, because its loss was not finite or rose too far."""
        return self.validation is None


def run_once(task: Task, arm_text: str, rate: float, seed: int, *, reads_test: bool, device: str = "cpu") -> Figures:
    """Train one arm of a task at a learning rate, and return its figures; only final runs read the test split.

    Raises:
        StudyError: for an arm, data or a model that cannot be trained.
    """
    start, arm = process_time(), read_arm(arm_text, task)
    configured = arm.task(task)
    settings = configured.model_dump(mode="json") | {"learning_rate": rate}
    configured = type(task)(**settings).located(task.folder)
    configuration = RunConfiguration(
        study="league",
        task=type(task).__name__,
        settings=settings,
        arm=arm.text,
        methods=arm.resolved(),
        seed=seed,
        purpose="final" if reads_test else "trial",
        device=device,
    )
    order = Order(configuration, Path(), "", device=device)
    part = part_of(configured, 0)
    train, validation = training_examples(part.task, configuration, part.phase.data)
    accelerator = accelerator_of(order, part.task)
    place = accelerator.device
    train = move(train, place)
    training = prepare(order, part, accelerator, train, None)
    try:
        done = 0
        while training.step < training.last_step if training.last_step else done < part.task.epochs:
            epoch = train_epoch(training, train, done + 1, lambda step, loss, metric: None)
            done += 1
            if epoch.divergence is not None:
                return Figures(None, None, None, process_time() - start)
        name, evaluations = task.all_metrics()[0].name, {one.name: one for one in evaluations_of(configured)}
        examples = {"train": train, "validation": validation}
        if reads_test:
            examples["test"] = held_out_examples(part.task)
        figures: dict[str, float | None] = {"test": None}
        for split, some in examples.items():
            value = None if some is None else evaluate(training, evaluations[split], move(some, place))[name]
            figures[split] = value if value is not None and math.isfinite(value) else None
        return Figures(**figures, seconds=process_time() - start)
    finally:
        if training.regularized is not None and not training.regularized.removed:
            training.regularized.remove(discard=True)
