"""Which examples a run trains, chooses and is judged on. The test split is asked for by final runs alone."""

from __future__ import annotations

import torch

from headwise.comparing.run.configuration import RunConfiguration, derive
from headwise.comparing.run.train import Examples
from headwise.comparing.task import Task
from headwise.files.errors import StudyError


def training_examples(task: Task, configuration: RunConfiguration) -> tuple[Examples, Examples | None]:
    """Give the training and validation examples; a trial without a validation split holds out part of the training."""
    train, validation = _split(task, "train"), _split(task, "validation")
    if train is None:
        raise StudyError(f"{type(task).__name__}.data('train') gave None; a task needs training examples.")
    if configuration.purpose == "trial" and validation is None:
        train, validation = _hold_out(task, train)
    if task.train_size is not None:
        if task.train_size > len(train[0]):
            raise StudyError(
                f"train_size {task.train_size} is more than the {len(train[0])} training examples of "
                f"{type(task).__name__}. Choose a smaller --train-size."
            )
        chosen = torch.randperm(len(train[0]), generator=_generator(configuration.seed, "train_size"))
        chosen = chosen[: task.train_size]
        train = train[0][chosen], train[1][chosen]
    return train, validation


def test_examples(task: Task) -> Examples:
    """Give the test examples; a smaller `test_size` takes the same ones for all seeds and methods."""
    test = _split(task, "test")
    if test is None:
        raise StudyError(f"{type(task).__name__}.data('test') gave None; a task needs test examples.")
    if task.test_size is None:
        return test
    if task.test_size > len(test[0]):
        raise StudyError(
            f"test_size {task.test_size} is more than the {len(test[0])} test examples of {type(task).__name__}. "
            "Choose a smaller --test-size."
        )
    chosen = torch.randperm(len(test[0]), generator=_generator(0, "test_size"))[: task.test_size]
    return test[0][chosen], test[1][chosen]


def move(examples: Examples, device: torch.device) -> Examples:
    """Move a split onto the device once, whole."""
    return examples[0].to(device), examples[1].to(device)


def to_device(examples: Examples | None, device: torch.device) -> Examples | None:
    """Move a split that may be absent."""
    return None if examples is None else move(examples, device)


def _split(task: Task, name: str) -> Examples | None:
    examples = task.data(name)
    if examples is not None and (len(examples[0]) != len(examples[1]) or not len(examples[0])):
        raise StudyError(
            f"{type(task).__name__}.data({name!r}) gave {len(examples[0])} inputs and {len(examples[1])} targets; "
            "both need the same number of examples, at least one."
        )
    return examples


def _hold_out(task: Task, train: Examples) -> tuple[Examples, Examples]:
    count = task.held_out
    if not 0 < count < len(train[0]):
        raise StudyError(
            f"tuning needs a validation split: {type(task).__name__}.data('validation') gave None and held_out is "
            f"{count} of {len(train[0])} training examples. Give one of the two."
        )
    # the same examples for all seeds and methods: trials of all arms are judged alike
    order = torch.randperm(len(train[0]), generator=_generator(0, "held_out"))
    kept, held = order[:-count], order[-count:]
    return (train[0][kept], train[1][kept]), (train[0][held], train[1][held])


def _generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(derive(seed, name))
