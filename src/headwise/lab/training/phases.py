"""A phase and its position in a run, and the weights it starts from: the previous phase's or a checkpoint's."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from headwise.lab.experiments.subject import Phase, checkpoint_files
from headwise.lab.experiments.task import Task
from headwise.lab.experiments.task_source import build_task
from headwise.lab.training.checkpoint import read_checkpoint
from headwise_verdict import StudyError
from headwise_verdict.results import RunFiles


@dataclass(frozen=True)
class RunPart:
    """A phase, the task with its changes, its number (from 0), the number of phases, and the phase that follows."""

    task: Task
    phase: Phase
    number: int
    total: int
    following: Phase | None


def part_of(task: Task, number: int) -> RunPart:
    """Return part `number` of a run."""
    phases = task.phases()
    phase = phases[number]
    following = phases[number + 1] if number + 1 < len(phases) else None
    changed = task
    if phase.changes:
        changed = build_task(type(task), task.model_dump() | phase.changes).located(task.folder)
    return RunPart(changed, phase, number, len(phases), following)


Shapes = dict[str, tuple[int, ...]]

SHOWN = 4


def read_start(folder: Path) -> dict[str, Tensor]:
    """Return the weights in a checkpoint's folder by name.

    Raises StudyError if a file is damaged.
    """
    weights: dict[str, Tensor] = {}
    for path in checkpoint_files(folder):
        try:
            # the checkpoint of a run has a checksum
            weights |= read_checkpoint(path).tensors if path == RunFiles(folder).checkpoint else load_file(path)
        except (SafetensorError, ValueError, KeyError) as error:
            raise StudyError(
                f"{path}, from which a phase starts, is damaged ({error}). Give another folder."
            ) from error
    own = {name.removeprefix("model."): tensor for name, tensor in weights.items() if name.startswith("model.")}
    is_run = any(name.startswith("optimizer.") for name in weights) or RunFiles(folder).checkpoint.is_file()
    return own if is_run else weights


def start_shapes(folder: Path) -> Shapes:
    """Return the shapes of the weights in a checkpoint's folder by name; raises the errors of `read_start`."""
    return {name: tuple(tensor.shape) for name, tensor in read_start(folder).items()}


def shapes_of(model: nn.Module) -> Shapes:
    """Return the shapes of a model's weights by name."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def carry_over(phase: Phase, model: nn.Module, weights: dict[str, Tensor], origin: str) -> None:
    """Copy the weights whose names match the phase's `carry` into the model; the others keep their fresh values.

    Raises StudyError, with the model unchanged, if a wanted weight is missing or has another shape, if a carried weight
    does not exist in the model, or if a tensor that the model names in `same_in_checkpoints` differs.
    """
    mine = model.state_dict(keep_vars=True)
    wanted = check_carried(phase, model, {name: tuple(tensor.shape) for name, tensor in weights.items()}, origin)
    # what both must share although shapes cannot show it: the digest of a vocabulary
    for name in set(getattr(model, "same_in_checkpoints", ())) & set(wanted):
        if not torch.equal(weights[name].cpu(), mine[name].cpu()):
            raise StudyError(
                f"phase {phase.name!r} cannot start from {origin}: `{name}` differs from this model's. "
                "Start from another folder."
            )
    with torch.no_grad():
        for name in wanted:
            mine[name].copy_(weights[name])


def check_carried(phase: Phase, model: nn.Module, given: Shapes, origin: str) -> list[str]:
    """Return the names of the weights that a phase carries over.

    Raises StudyError if a wanted weight is missing or has another shape, or if a carried weight does not exist in the
    model.
    """
    mine = shapes_of(model)
    wanted = [name for name in mine if matches(name, phase.carry)]
    problems = [f"it has no {name}" for name in wanted if name not in given]
    problems += [
        f"its {name} is {given[name]}, the model's {mine[name]}"
        for name in wanted
        if name in given and given[name] != mine[name]
    ]
    problems += [f"the model has no {name}" for name in given if name not in mine and matches(name, phase.carry)]
    if problems or not wanted:
        more = f", and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        reason = "; ".join(problems[:SHOWN]) + more if problems else f"no weight of the model matches {phase.carry}"
        raise StudyError(
            f"phase {phase.name!r} cannot start from {origin}: {reason}. Name the weights that both have in the "
            "phase's carry=."
        )
    return wanted


def check_learned(phase: Phase, model: nn.Module) -> list[str]:
    """Return the names of the parameters that a phase trains; raise StudyError if `learn` matches none."""
    names = [name for name, _ in model.named_parameters()]
    learned = [name for name in names if matches(name, phase.learn)]
    if not learned:
        patterns = ", ".join(phase.learn)
        raise StudyError(
            f"phase {phase.name!r} learns {patterns}, which matches no parameter of the model: {', '.join(names[:6])} …"
        )
    return learned


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a parameter's name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
