"""The state of a run between its steps, as checkpoints store it, and its times."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.files.durable import as_line, write_bytes
from headwise.lab.training.checkpoint import Mark, RunCheckpoint, flatten_optimizer, load_checkpoint, restore_optimizer
from headwise.lab.training.divergence import Smoothed
from headwise.lab.training.train import Training
from headwise_verdict import StudyError
from headwise_verdict.files import read_json
from headwise_verdict.results import Apart, EpochLine, RunFiles, StoredRecord

TIMES = "times.json"


def save_times(folder: Path, state: RunState) -> None:
    """Write the times of every epoch and the memory of a step, without flushing: they need not survive a power cut."""
    epochs = {str(line.epoch): [line.seconds, line.apart.steps, line.apart.seconds] for line in state.history}
    content = as_line({"peak_memory": state.peak_memory, "epochs": epochs}).encode()
    write_bytes(folder / TIMES, content, flush=False)


def without_times(state: RunState) -> RunState:
    """Return the state without times and memory, so that equal runs have equal states."""
    history = [line.model_copy(update={"seconds": 0.0, "apart": Apart()}) for line in state.history]
    return state.model_copy(update={"history": history, "peak_memory": None})


def with_times(state: RunState, folder: Path) -> RunState:
    """Return the state with its stored times; an epoch whose time is lost does not count in averages."""
    content = read_json(folder / TIMES)
    stored = content if isinstance(content, dict) else {}
    epochs = stored.get("epochs")
    history = [_timed(line, epochs if isinstance(epochs, dict) else {}) for line in state.history]
    memory = stored.get("peak_memory")
    return state.model_copy(update={"history": history, "peak_memory": memory if isinstance(memory, int) else None})


def _timed(line: EpochLine, epochs: dict[str, Any]) -> EpochLine:
    try:
        seconds, steps, apart = epochs[str(line.epoch)]
        update = {"seconds": float(seconds), "apart": Apart(steps=int(steps), seconds=float(apart))}
    except (KeyError, TypeError, ValueError):
        update = {"apart": Apart(steps=line.steps)}
    return line.model_copy(update=update)


# START marks the initial values of the methods' parameters
MODEL, OPTIMIZER, START = "model.", "optimizer.", "start."


class RunState(StoredRecord):
    """The plain part of a checkpoint: position of the run, its measurements, and the state of its parts."""

    run: str = ""
    phase: int = 0
    # epochs of this phase
    done: int = 0
    step: int = 0
    first_step: int = 0
    history: list[EpochLine] = []
    # of earlier phases
    outcomes: dict[str, float] = {}
    optimizer: dict[str, Any] = {}
    # names of the optimizer's parameters, whose moments are stored by position
    parameters: list[str] = []
    rates: dict[str, Any] = {}
    draws: dict[str, Any] | None = None
    # bytes of one step; stored next to the checkpoint, with the times
    peak_memory: int | None = None
    smoothed: tuple[float | None, float] = (None, math.inf)
    # of a run with a goal of the training loss
    course: dict[str, Any] | None = None
    # of a watched run
    readings: Mark | None = None

    def after(self, line: EpochLine, training: Training) -> RunState:
        """Return the state after one more epoch."""
        changes = {"done": self.done + 1, "history": [*self.history, line], "step": training.step}
        return self.model_copy(update=changes)

    def following(self, outcomes: dict[str, float]) -> RunState:
        """Return the state at the start of the next phase, before anything of it is built."""
        changes = {"phase": self.phase + 1, "done": 0, "first_step": self.step, "outcomes": self.outcomes | outcomes}
        return self.model_copy(update=changes)


def load_state(folder: Path, run: str, note: Callable[[str], None]) -> tuple[RunState, dict[str, Tensor] | None]:
    """Return the state and tensors of the newest complete checkpoint of a run, or a fresh state and None."""
    saved = load_checkpoint(folder, note, run)
    return (RunState(run=run), None) if saved is None else (RunState.model_validate(saved.state), saved.tensors)


def checkpoint_of(state: RunState, training: Training) -> RunCheckpoint:
    """Return the checkpoint of a training: everything needed to resume it, and nothing else."""
    moments, plain = flatten_optimizer(training.optimizer)
    model = training.accelerator.unwrap_model(training.model).state_dict()
    tensors = {MODEL + k: t for k, t in model.items()} | {OPTIMIZER + k: t for k, t in moments.items()}
    tensors |= {START + k: t for k, t in training.starts.items()}
    parts = {
        "optimizer": plain,
        "parameters": _names(training),
        "rates": training.rates.state() if training.rates is not None else {},
        "draws": training.regularized.state() if training.regularized is not None else None,
        "smoothed": (training.smoothed.mean, training.smoothed.least),
        "course": training.course.state() if training.course is not None else None,
    }
    return RunCheckpoint(tensors, state.model_copy(update=parts).model_dump())


def _names(training: Training) -> list[str]:
    """Return the names of the optimizer's parameters, in its order."""
    model = training.accelerator.unwrap_model(training.model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in training.optimizer.param_groups for parameter in group["params"]]


def restore(training: Training, state: RunState, tensors: dict[str, Tensor], folder: Path) -> None:
    """Set a freshly prepared training to the state of its checkpoint.

    Raises:
        StudyError: if the optimizer has other parameters than the one in the checkpoint, or in another order.
    """
    if state.parameters != _names(training):
        raise StudyError(
            f"{folder}: its checkpoint was written by an optimizer with other parameters, or in another order, so that "
            "each would continue with the moments of another. Delete this folder, and start the command again."
        )
    model = {k.removeprefix(MODEL): t for k, t in tensors.items() if k.startswith(MODEL)}
    moments = {k.removeprefix(OPTIMIZER): t for k, t in tensors.items() if k.startswith(OPTIMIZER)}
    training.accelerator.unwrap_model(training.model).load_state_dict(model)
    restore_optimizer(training.optimizer, moments, state.optimizer)
    device = training.accelerator.device
    training.starts |= {k.removeprefix(START): t.to(device) for k, t in tensors.items() if k.startswith(START)}
    training.step, training.first_step = state.step, state.first_step
    if training.last_step is not None and training.task.steps is not None:
        training.last_step = state.first_step + training.task.steps
    training.clock.memory.peak = state.peak_memory
    training.smoothed = Smoothed(*state.smoothed)
    if training.course is not None and state.course is not None:
        training.course.load_state(state.course)
    if training.rates is not None and state.rates:
        training.rates.load_state(state.rates)
    if training.regularized is not None and state.draws is not None:
        training.regularized.load_state(state.draws)
    if training.watch is not None:
        # each phase has its own watch: readings of earlier phases do not count
        known = [line for line in RunFiles(folder).readings() if state.first_step <= line["step"] < state.step]
        training.watch.step_to(training.step, known)
