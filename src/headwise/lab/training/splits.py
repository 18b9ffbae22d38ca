"""The splits of a task: training, validation and held-out examples."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from headwise.lab.experiments.configuration import RunConfiguration, derive
from headwise.lab.experiments.evaluation import Evaluation
from headwise.lab.experiments.task import Task
from headwise.lab.training.batches import Examples, describe, fault, first_batch, move, size, take
from headwise.lab.training.task_code import at_fault
from headwise_verdict import StudyError


def training_examples(
    task: Task, configuration: RunConfiguration, split: str = "train"
) -> tuple[Examples, Examples | None]:
    """Return the training and validation examples; a trial without a validation split holds out training examples."""
    train, validation = examples_of(task, split), examples_of(task, "validation")
    if train is None:
        raise StudyError(f"{type(task).__name__}.data({split!r}) returned None; a task needs training examples.")
    if configuration.purpose == "trial" and validation is None:
        train, validation = _hold_out(task, train)
    if task.train_size is not None:
        if task.train_size > size(train):
            raise StudyError(
                f"train_size {task.train_size} is more than the {size(train)} training examples of "
                f"{type(task).__name__}. Choose a smaller --train-size."
            )
        chosen = torch.randperm(size(train), generator=_generator(configuration.seed, "train_size"))
        train = take(train, chosen[: task.train_size])
    return train, validation


def held_out_examples(task: Task, split: str = "test") -> Examples:
    """Return the examples of a held-out split; `test_size` selects the same subset for all seeds and methods."""
    test = examples_of(task, split)
    if test is None:
        raise StudyError(f"{type(task).__name__}.data({split!r}) returned None; a task needs {split} examples.")
    if task.test_size is None or (split != "test" and task.test_size >= size(test)):
        return test
    if task.test_size > size(test):
        raise StudyError(
            f"test_size {task.test_size} is more than the {size(test)} {split} examples of {type(task).__name__}. "
            "Choose a smaller --test-size."
        )
    return take(test, torch.randperm(size(test), generator=_generator(0, "test_size"))[: task.test_size])


def examples_of(task: Task, split: str) -> Examples | None:
    """Return a split as the task provides it, or None; raise StudyError with its shapes if it is invalid."""
    try:
        examples = task.data(split)
    except (StudyError, ImportError, OSError, MemoryError):
        raise
    except Exception as error:
        raise StudyError(f"{type(task).__name__}.data({split!r}) fails: {at_fault(task, error)}") from error
    if examples is None:
        return None
    wrong = fault(examples)
    if wrong is not None:
        raise StudyError(
            f"{type(task).__name__}.data({split!r}) returned {describe(examples)}: {wrong}. Return (inputs, "
            "targets) or a "
            "dict of tensors, with the same number of examples, at least one, in every first dimension."
        )
    return examples


def _hold_out(task: Task, train: Examples) -> tuple[Examples, Examples]:
    count = task.held_out
    if not 0 < count < size(train):
        raise StudyError(
            f"tuning needs a validation split: {type(task).__name__}.data('validation') returned None and held_out is "
            f"{count} of {size(train)} training examples. Give one of the two."
        )
    # the same examples for all seeds and methods, so that trials of all arms are comparable
    order = torch.randperm(size(train), generator=_generator(0, "held_out"))
    return take(train, order[:-count]), take(train, order[-count:])


def _generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(derive(seed, name))


@dataclass(frozen=True)
class Splits:
    """The training and validation examples of a phase, and the other splits on demand."""

    task: Task
    device: torch.device
    train: Examples
    validation: Examples | None
    evaluations: list[Evaluation]
    final: bool
    others: dict[str, Examples] = field(default_factory=dict)
    # loaded before they are needed, not yet on the device
    waiting: dict[str, Examples] = field(default_factory=dict)

    def examples(self, evaluation: Evaluation) -> Examples | None:
        """Return the examples of an evaluation; None if a trial may not see them, or they do not exist."""
        if evaluation.split == "train":
            return self.train
        if evaluation.split == "validation":
            return self.validation
        return self._other(evaluation.split) if self.final else None

    def few(self, evaluation: Evaluation, count: int) -> Examples | None:
        """Return the first examples of an evaluation on the device, without moving the others."""
        examples = self.ahead(evaluation)
        return None if examples is None else move(first_batch(self.task, examples, count), self.device)

    def ahead(self, evaluation: Evaluation) -> Examples | None:
        """Return at most `limit` examples of an evaluation before they are needed, on whatever device they are."""
        if evaluation.split in ("train", "validation") or not self.final:
            examples = self.examples(evaluation)
        else:
            if evaluation.split not in self.waiting:
                self.waiting[evaluation.split] = held_out_examples(self.task, evaluation.split)
            examples = self.waiting[evaluation.split]
        if examples is None or evaluation.limit is None:
            return examples
        return take(examples, slice(0, evaluation.limit))

    def judged(self) -> tuple[Evaluation, Examples]:
        """Return the deciding evaluation and its examples; those of training if a trial may not see them."""
        deciding = next(e for e in self.evaluations if e.name == self.task.decides_on)
        examples = self.examples(deciding)
        return (Evaluation("train"), self.train) if examples is None else (deciding, examples)

    def only(self, evaluations: list[Evaluation]) -> Splits:
        """Return the same splits with only these evaluations."""
        return replace(self, evaluations=evaluations)

    def _other(self, split: str) -> Examples:
        if split not in self.others:
            examples = self.waiting.pop(split, None)
            examples = held_out_examples(self.task, split) if examples is None else examples
            self.others[split] = move(examples, self.device)
        return self.others[split]
