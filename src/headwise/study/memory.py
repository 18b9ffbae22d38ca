"""How much tensor memory one training step takes, read from the allocator's own events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from headwise.study.train import Training

# the first step also creates the optimizer's state
FIRST_MEASURED = 2


def measure_step(training: Training, step: int) -> AbstractContextManager[None]:
    """Measure the peak of tensor memory above the level before this step, once a run; changes no number."""
    if step < FIRST_MEASURED or training.peak_memory is not None:
        return nullcontext()
    return _on_cuda(training) if training.accelerator.device.type == "cuda" else _on_cpu(training)


@contextmanager
def _on_cuda(training: Training) -> Iterator[None]:
    device = training.accelerator.device
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    yield
    training.peak_memory = torch.cuda.max_memory_allocated(device) - before


@contextmanager
def _on_cpu(training: Training) -> Iterator[None]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield
    level = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    training.peak_memory = peak
