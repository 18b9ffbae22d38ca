"""What can be known of arms before one is tried: each describes a task that can be, names layers that exist, and sees
the same data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from headwise.experiments.arm import Arm
from headwise.experiments.recipe import Recipe
from headwise.experiments.subject import Subject
from headwise.experiments.task import Task
from headwise.files.errors import StudyError
from headwise.training.built_model import build_model
from headwise.training.preflight import check_task, evaluations_of
from headwise.training.splits import examples_of


def check_arms(arms: Iterable[Arm], task: Subject) -> None:
    """Refuse an arm whose task cannot be, whose layers the model does not have, or whose changes give it other data
    than the baseline's.

    Models are built, and data is read, only for arms for which it can matter; a script is asked when it is tried.

    Raises:
        StudyError: naming the arm.
    """
    if not isinstance(task, Task):
        return
    for arm in arms:
        check_task(arm.task(task))
        try:
            _check_where(arm, task)
            _check_data(arm, task)
        except StudyError as error:
            raise StudyError(f"{arm.text}: {error}") from error


def _check_where(arm: Arm, task: Task) -> None:
    if arm.where is None:
        return
    from headwise.hosts.finding import sites

    with torch.random.fork_rng(devices=[]):
        arm.where.check(sites(build_model(arm.task(task))))


def _check_data(arm: Arm, task: Task) -> None:
    names = [name for name, _ in arm.changes if name not in Recipe.model_fields]
    if not names:
        return
    changed = arm.task(task)
    if _trained(changed) != _trained(task):
        raise StudyError(
            f"its changes ({', '.join(names)}) train it on {', '.join(_trained(changed))}, the baseline on "
            f"{', '.join(_trained(task))}, and then a seed makes no pair. Change this for all arms with --set."
        )
    for split in _splits(task):
        if not _equal(examples_of(task, split), examples_of(changed, split)):
            raise StudyError(
                f"its changes ({', '.join(names)}) give it other {split} examples than the baseline's, and then a "
                "seed makes "
                "no pair. Change this for all arms with --set, or change what happens to a batch."
            )


def _splits(task: Task) -> list[str]:
    """Name the splits that runs of a task train on and are judged on."""
    judged = [evaluation.split for evaluation in evaluations_of(task)]
    # what an evaluation calls "train" is what its phase trains on
    return list(dict.fromkeys([*_trained(task), "validation", *(split for split in judged if split != "train")]))


def _trained(task: Task) -> list[str]:
    return list(dict.fromkeys(phase.data for phase in task.phases()))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and _same_values(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one is other or one == other)


def _same_values(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    if not one.is_floating_point():
        return False
    # a value that is missing equals none, itself neither
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
