"""Steps that do more than train: a reading of the watch, the measurement of memory. Their time is counted apart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headwise.comparing.run.memory import is_measured, measure_step

if TYPE_CHECKING:
    from headwise.comparing.run.train import Training


@dataclass
class Apart:
    """Count the steps of an epoch whose time is not that of training, and their seconds."""

    steps: int = 0
    seconds: float = 0.0


@contextmanager
def counted(training: Training, step: int, apart: Apart) -> Iterator[None]:
    """Carry out step `step` of the run; where it also reads or measures, add it to `apart`."""
    watch = training.watch
    read = watch is not None and watch.steps % watch.every == 0
    if not read and not is_measured(training, step):
        yield
        return
    start = _now(training.accelerator.device)
    with measure_step(training, step):
        yield
    apart.steps += 1
    apart.seconds += _now(training.accelerator.device) - start


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        # what was queued before belongs to the steps before
        torch.cuda.synchronize(device)
    return time.perf_counter()
