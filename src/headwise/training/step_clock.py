"""Steps that do more than train: a reading of the watch, the measurement of memory. Their time is counted apart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from headwise.training.memory import MemoryOfAStep


@dataclass
class Clock:
    """Hold the memory of one step of the run, and the steps of an epoch whose time is not that of training."""

    memory: MemoryOfAStep = field(default_factory=MemoryOfAStep)
    apart: dict[str, Any] = field(default_factory=lambda: {"steps": 0, "seconds": 0.0})


class Timed(Protocol):
    """What a training shows to its clock."""

    watch: Any | None
    accelerator: Any
    clock: Clock


@contextmanager
def counted(training: Timed, step: int) -> Iterator[None]:
    """Carry out step `step` of the run; where it also reads or measures, count it apart."""
    watch, clock = training.watch, training.clock
    read = watch is not None and watch.steps % watch.every == 0
    if not read and not clock.memory.is_due(step):
        yield
        return
    device = training.accelerator.device
    start = now(device)
    with clock.memory.measured(step, device):
        yield
    clock.apart["steps"] += 1
    clock.apart["seconds"] += now(device) - start


def now(device: torch.device) -> float:
    """Give the seconds of the performance counter when the device has done what was asked of it."""
    if device.type == "cuda":
        # what was queued before belongs to the steps before
        torch.cuda.synchronize(device)
    return time.perf_counter()
