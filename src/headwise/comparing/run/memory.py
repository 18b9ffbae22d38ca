"""How much tensor memory one training step takes, read from the allocator's own events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from headwise.comparing.run.train import Training

# the first step also creates the optimizer's state
FIRST_MEASURED = 2


def is_measured(training: Training, step: int) -> bool:
    """Tell whether this step is the one of the run whose memory is measured."""
    return step >= FIRST_MEASURED and training.peak_memory is None


def measure_step(training: Training, step: int) -> AbstractContextManager[None]:
    """Measure the peak of tensor memory above the level before this step, once a run; changes no number."""
    if not is_measured(training, step):
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
    training.peak_memory = _peak(profile.profiler.kineto_results.experimental_event_tree())


def _peak(roots: Any) -> int:
    """Give the most bytes that were held at a time of what this step allocated."""
    events, waiting = [], list(roots)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]":
            events.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    level = peak = 0
    held = set()
    for _, place, size in sorted(events, key=lambda found: found[0]):
        if size < 0 and place not in held:
            # what was there before goes when Python comes by: the leftovers of another run change no figure of this one
            continue
        (held.add if size > 0 else held.discard)(place)
        level += size
        peak = max(peak, level)
    return peak
