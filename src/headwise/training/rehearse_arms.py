"""Fit the methods of every arm once before any run trains: an arm that cannot be is told before hours of the others."""

from __future__ import annotations

import dataclasses

import torch

from headwise.experiments.arm import read_arm
from headwise.experiments.configuration import RunConfiguration
from headwise.files.errors import StudyError, is_for_users
from headwise.training.batches import epoch_steps, first_batch, lengths_of, make_batch, move, size
from headwise.training.built_model import build_model
from headwise.training.fit import fit
from headwise.training.job import Rehearsal
from headwise.training.part import Part, part_of
from headwise.training.splits import training_examples


def rehearse_arms(order: Rehearsal) -> None:
    """Fit each arm's methods onto a fresh model, as its runs will, and take them off again.

    Raises StudyError naming each arm that cannot be, and once what several have in common.
    """
    torch.set_num_threads(order.configuration.threads)
    problems: dict[str, list[str]] = {}
    for configuration in order.arms:
        task = dataclasses.replace(order, configuration=configuration).task()
        parts = [part for part in (part_of(task, at) for at in range(len(task.phases()))) if part.phase.methods]
        try:
            for part in parts:
                _try_arm(part, configuration, torch.device(order.device))
        except Exception as error:
            if not is_for_users(error):
                raise
            problems.setdefault(str(error), []).append(configuration.arm)
    if problems:
        raise StudyError("\n".join(f"{'; '.join(arms)}: {problem}" for problem, arms in problems.items()))


def _try_arm(part: Part, configuration: RunConfiguration, device: torch.device) -> None:
    task = part.task
    arm = read_arm(configuration.arm, task)
    if not arm.methods:
        return
    train, _ = training_examples(task, configuration, part.phase.data)
    with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
        model = build_model(task).to(device)
        example = make_batch(task, move(first_batch(task, train, 2), device), None).inputs
        steps = task.steps or task.epochs * epoch_steps(task, size(train), lengths_of(task, train), configuration.draws)
        handle = fit(arm, model, example=example, seed=configuration.draws, steps=steps)
        if handle is not None:
            handle.remove(discard=True)
