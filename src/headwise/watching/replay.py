"""Replay: the steps before an alert, run again from the file that was kept of them, and read at every step."""

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

from headwise.core.settings import suggest
from headwise.files.health_records import Alert, Record
from headwise.regularizing.handle import Regularized, handle
from headwise.regularizing.optimizer_steps import OptimizerSteps
from headwise.watching.losses import LOSS_SPIKE
from headwise.watching.replay_file import random_left_alone, read_replay, set_random_state
from headwise.watching.updates import GRADIENT_SPIKE
from headwise.watching.watch import watch

# told from more steps than are run again
LOOK_BACK = (LOSS_SPIKE, GRADIENT_SPIKE)
Step = Callable[[Any], Any]


@dataclass
class Replay:
    """What the steps said when they were run again.

    Attributes:
        alerts: those that the file was written for.
        losses: by step: the loss then (None where it was not given) and now.
        records: every reading now.
        differences: by step that was read then too: the largest relative difference of a reading, 0 where all have the
            same bits.
    """

    alerts: list[Alert]
    losses: dict[int, tuple[float | None, float | None]] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    differences: dict[int, float] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Return the lines of a table: a row for each step, a column for each figure that raised an alert."""
        places = ((a["statistic"], a["site"], a["head"]) for a in self.alerts if a["statistic"] not in LOOK_BACK)
        shown = list(dict.fromkeys(places))[:6]
        for alert in self.alerts:
            yield f"step {alert['step']}: {alert['sentence']}"
        heads = [f"{name} {site}" + ("" if head is None else f" head {head}") for name, site, head in shown]
        yield " | ".join(["step", "loss then", "loss now", *heads])
        values = {(r["step"], r["statistic"], r["site"], r["head"]): r["value"] for r in self.records}
        for step, (then, now) in self.losses.items():
            cells = [_number(values.get((step, *place))) for place in shown]
            yield " | ".join([str(step), _number(then), _number(now), *cells])
        for step, difference in self.differences.items():
            same = "the same bits" if difference == 0 else f"within {difference:.2g} of what they were"
            yield f"readings of step {step}: {same}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.6g}"


def replay(path: Path, model: nn.Module, optimizers: list[Optimizer], step: Step) -> Replay:
    """Run the steps of a replay file again and read the model at every one.

    Args:
        path: what `headwise.watch(..., keep=N)` wrote.
        model: as the training made it, regularized where it was; its weights are overwritten.
        optimizers: of the training, in the order of their first steps; their state is overwritten.
        step: takes what `batch=` named, trains on it, updates the model, and returns the loss or None.

    Raises:
        ValueError: where the file or the model is another one.
    """
    kept = read_replay(path)
    state, regularized = kept["state"], _handle(model)
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise ValueError(f"{path} is of another model: {str(error).splitlines()[0]}") from error
    if (state["handle"] is None) != (regularized is None):
        raise ValueError(
            f"the model of {path} was {'not ' if state['handle'] is None else ''}regularized, and this one differs"
        )
    if regularized is not None:
        regularized.load_state(state["handle"])
    if state["optimizers"] and len(state["optimizers"]) != len(optimizers):
        raise ValueError(f"{path} holds {len(state['optimizers'])} optimizers, and {len(optimizers)} were given")
    for optimizer, before in zip(optimizers, state["optimizers"], strict=False):
        optimizer.load_state_dict(before)
    found = Replay(kept["alerts"])
    reading = watch(
        model.train(), every=1, on_alert=None, statistics=kept["watch"]["statistics"], rows=kept["watch"]["rows"]
    )
    reading.step_to(state["step"])
    try:
        with random_left_alone():
            for entry in kept["steps"]:
                with _as_it_was(model, optimizers, entry):
                    loss = step(entry["batch"])
                reading.step(loss if entry["loss"] is not None else None)
                found.losses[entry["step"]] = _float(entry["loss"]), _float(loss)
    finally:
        reading.remove()
    found.records = reading.records()
    found.differences = dict(_compared(kept["readings"], found.records))
    return found


def _handle(model: nn.Module) -> Regularized | None:
    try:
        return handle(model)
    except ValueError:
        return None


def _float(value: Tensor | float | None) -> float | None:
    return float(value.detach() if isinstance(value, Tensor) else value) if value is not None else None


@contextmanager
def _as_it_was(model: nn.Module, optimizers: list[Optimizer], entry: dict[str, Any]) -> Iterator[None]:
    """Set the random state of a step's first forward, and the settings that every optimizer had."""
    waiting = [True]

    def forward(module: nn.Module, args: Any) -> None:
        if waiting and module.training and not torch.compiler.is_compiling():
            waiting.clear()
            set_random_state(entry["random"])

    def settings(number: int, optimizer: Optimizer) -> None:
        at = next((place for place, one in enumerate(optimizers) if one is optimizer), None)
        if at is not None and at < len(entry["settings"]):
            for group, then in zip(optimizer.param_groups, entry["settings"][at], strict=True):
                group.update(then)

    set_random_state(entry["random"])
    hook, listening = model.register_forward_pre_hook(forward), OptimizerSteps(model, settings)
    listening.listen()
    try:
        yield
    finally:
        hook.remove()
        listening.stop()


def _compared(then: list[Record], now: list[Record]) -> Iterator[tuple[int, float]]:
    """Return for each step that both read the largest relative difference."""
    values = {_place(record): record["value"] for record in now}
    apart: dict[int, float] = {}
    for record in then:
        if record["statistic"] in LOOK_BACK or (found := values.get(_place(record))) is None:
            continue
        alike = found == record["value"] or (math.isnan(found) and math.isnan(record["value"]))
        size = max(abs(found), abs(record["value"]), 1e-30)
        difference = 0.0 if alike else abs(found - record["value"]) / size
        apart[record["step"]] = max(apart.get(record["step"], 0.0), difference)
    yield from sorted(apart.items())


def _place(record: Record) -> tuple[Any, ...]:
    return record["step"], record["statistic"], record["site"], record["head"], record.get("group")


def run(file: Path, training: str) -> None:
    """Replay a file with the training that `FILE.py:FUNCTION` gives, and print what every step said.

    The function gives `(model, optimizer or list of them, step)`, as `replay` takes them.

    Raises:
        ValueError: where the training cannot be had, with the remedy.
    """
    model, optimizers, step = _training(training)
    for line in replay(file, model, optimizers, step).lines():
        print(line)


FORM = "a training is FILE.py:FUNCTION, a function without arguments that gives (model, optimizer, step)"


def _training(text: str) -> tuple[nn.Module, list[Optimizer], Step]:
    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not Path(file).is_file():
        raise ValueError(f"there is no file {file or text!r}: {FORM}")
    spec = importlib.util.spec_from_file_location(f"headwise_replayed_{Path(file).stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    made = getattr(module, name, None)
    if not callable(made):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"{file} has no function {name!r}.{suggest(name, known)} {FORM}")
    found = made()
    if not (isinstance(found, tuple) and len(found) == 3 and isinstance(found[0], nn.Module) and callable(found[2])):
        raise ValueError(f"{text} gave {type(found).__name__}: {FORM}")
    optimizers = [found[1]] if isinstance(found[1], Optimizer) else list(found[1])
    return found[0], optimizers, found[2]
