"""Part: a phase in its place in a run, with the task as it is there."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.experiments.phase import Phase
from headwise.experiments.task import Task
from headwise.experiments.task_source import build_task


@dataclass(frozen=True)
class Part:
    """Hold a phase, the task with its changes, its number, counted from 0, how many there are, and what follows."""

    task: Task
    phase: Phase
    number: int
    total: int
    following: Phase | None


def part_of(task: Task, number: int) -> Part:
    """Return part `number` of a run."""
    phases = task.phases()
    phase = phases[number]
    following = phases[number + 1] if number + 1 < len(phases) else None
    changed = task
    if phase.changes:
        changed = build_task(type(task), task.model_dump() | phase.changes).located(task.folder)
    return Part(changed, phase, number, len(phases), following)
