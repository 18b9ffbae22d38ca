"""Replay of the steps before an alert from a replay file, with a reading at every step."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headwise.attend import OptimizerSteps
from headwise.files.errors import suggest
from headwise.health.health_records import Alert, Record
from headwise.health.watching.losses import LOSS_SPIKE
from headwise.health.watching.places import handle_of
from headwise.health.watching.replay_file import random_left_alone, read_replay, set_random_state
from headwise.health.watching.updates import GRADIENT_SPIKE
from headwise.health.watching.watch import watch

# Figures that depend on more earlier steps than a replay runs.
LOOK_BACK = (LOSS_SPIKE, GRADIENT_SPIKE)
Step = Callable[[Any], Any]


@dataclass
class Replay:
    """Losses and readings of the replayed steps, compared with those of the original training.

    Attributes:
        alerts: the alerts that the file was written for.
        losses: by step, the original loss (None if it was not passed to `step()`) and the loss of the replay.
        records: all records of the replay.
        differences: by step that the original training read too, the largest relative difference of a value; 0 if all
            values are equal bit for bit.
    """

    alerts: list[Alert]
    losses: dict[int, tuple[float | None, float | None]] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    differences: dict[int, float] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Return the lines of a table: a row for each step, a column for each figure that raised an alert."""
        places = ((a["statistic"], a["site"], a["head"]) for a in self.alerts if a["statistic"] not in LOOK_BACK)
        columns = list(dict.fromkeys(places))[:6]
        for alert in self.alerts:
            yield f"step {alert['step']}: {alert['sentence']}"
        heads = [f"{name} {site}" + ("" if head is None else f" head {head}") for name, site, head in columns]
        yield " | ".join(["step", "loss then", "loss now", *heads])
        values = {(r["step"], r["statistic"], r["site"], r["head"]): r["value"] for r in self.records}
        for step, (then, now) in self.losses.items():
            cells = [_number(values.get((step, *place))) for place in columns]
            yield " | ".join([str(step), _number(then), _number(now), *cells])
        for step, difference in self.differences.items():
            same = "the same bits" if difference == 0 else f"within {difference:.2g} of what they were"
            yield f"readings of step {step}: {same}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.6g}"


def replay(path: Path, model: nn.Module, optimizers: list[Optimizer], step: Step) -> Replay:
    """Run the steps of a replay file again, read the model at each of them, and return the comparison.

    Args:
        path: a file that `headwise.watch(..., keep=N)` wrote.
        model: the model as the training builds it, regularized if it was; its weights are overwritten.
        optimizers: the optimizers of the training, in the order of their first steps; their states are overwritten.
        step: a function that gets the value of `batch=`, trains on it, updates the model, and returns the loss or None.

    Raises:
        ValueError: if the file is not a replay file, or the model or the optimizers do not match it.
    """
    saved = read_replay(path)
    state, regularized = saved["state"], handle_of(model)
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise ValueError(
            f"{path} is of another model, pass the model as the training builds it: {str(error).splitlines()[0]}"
        ) from error
    if (state["handle"] is None) != (regularized is None):
        raise ValueError(
            f"the model of {path} was {'not ' if state['handle'] is None else ''}regularized, and this one differs: "
            "pass the model as the training builds it"
        )
    if regularized is not None:
        regularized.load_state(state["handle"])
    if state["optimizers"] and len(state["optimizers"]) != len(optimizers):
        raise ValueError(
            f"{path} has the states of {len(state['optimizers'])} optimizers, got {len(optimizers)}: pass those of the "
            "training, in the order of their first steps"
        )
    for optimizer, before in zip(optimizers, state["optimizers"], strict=False):
        optimizer.load_state_dict(before)
    result = Replay(saved["alerts"])
    watching = watch(
        model.train(), every=1, on_alert=None, statistics=saved["watch"]["statistics"], rows=saved["watch"]["rows"]
    )
    watching.step_to(state["step"])
    try:
        with random_left_alone():
            for entry in saved["steps"]:
                with _original_conditions(model, optimizers, entry):
                    loss = step(entry["batch"])
                watching.step(loss if entry["loss"] is not None else None)
                result.losses[entry["step"]] = _float(entry["loss"]), _float(loss)
    finally:
        watching.remove()
    result.records = watching.records()
    result.differences = dict(_differences(saved["readings"], result.records))
    return result


def _float(value: Tensor | float | None) -> float | None:
    return float(value.detach() if isinstance(value, Tensor) else value) if value is not None else None


@contextmanager
def _original_conditions(model: nn.Module, optimizers: list[Optimizer], entry: dict[str, Any]) -> Iterator[None]:
    """Restore the random state at the step's first forward, and each optimizer's settings before it steps."""
    waiting = [True]

    def restore_random_state(module: nn.Module, args: Any) -> None:
        if waiting and module.training and not torch.compiler.is_compiling():
            waiting.clear()
            set_random_state(entry["random"])

    def restore_settings(number: int, optimizer: Optimizer) -> None:
        index = next((index for index, other in enumerate(optimizers) if other is optimizer), None)
        if index is not None and index < len(entry["settings"]):
            for group, original in zip(optimizer.param_groups, entry["settings"][index], strict=True):
                group.update(original)

    set_random_state(entry["random"])
    hook, listening = model.register_forward_pre_hook(restore_random_state), OptimizerSteps(model, restore_settings)
    listening.listen()
    try:
        yield
    finally:
        hook.remove()
        listening.stop()


def _differences(original: list[Record], replayed: list[Record]) -> Iterator[tuple[int, float]]:
    """Yield each step with readings in both lists and the largest relative difference of its values."""
    values = {_place(record): record["value"] for record in replayed}
    largest: dict[int, float] = {}
    for record in original:
        if record["statistic"] in LOOK_BACK or (value := values.get(_place(record))) is None:
            continue
        equal = value == record["value"] or (math.isnan(value) and math.isnan(record["value"]))
        size = max(abs(value), abs(record["value"]), 1e-30)
        difference = 0.0 if equal else abs(value - record["value"]) / size
        largest[record["step"]] = max(largest.get(record["step"], 0.0), difference)
    yield from sorted(largest.items())


def _place(record: Record) -> tuple[Any, ...]:
    return record["step"], record["statistic"], record["site"], record["head"], record.get("group")


def run(file: Path, training: str) -> None:
    """Replay a file and print the comparison of each step.

    Args:
        file: the replay file.
        training: `FILE.py:FUNCTION`, a function without arguments that returns `(model, optimizer or list of them,
            step)`, the arguments of `replay`.

    Raises:
        ValueError: if the function cannot be loaded or does not return these three, or as in `replay`.
    """
    model, optimizers, step = _training(training)
    for line in replay(file, model, optimizers, step).lines():
        print(line)


FORM = "pass the training as FILE.py:FUNCTION, a function without arguments that returns (model, optimizer, step)"


def _training(text: str) -> tuple[nn.Module, list[Optimizer], Step]:
    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not Path(file).is_file():
        raise ValueError(f"there is no file {file or text!r}: {FORM}")
    spec = importlib.util.spec_from_file_location(f"headwise_replayed_{Path(file).stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    build = getattr(module, name, None)
    if not callable(build):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"{file} has no function {name!r}.{suggest(name, known)} {FORM}")
    parts = build()
    if not (isinstance(parts, tuple) and len(parts) == 3 and isinstance(parts[0], nn.Module) and callable(parts[2])):
        raise ValueError(f"{text} returned {type(parts).__name__}: {FORM}")
    optimizers = [parts[1]] if isinstance(parts[1], Optimizer) else list(parts[1])
    return parts[0], optimizers, parts[2]
