"""How much tensor memory one training step takes, read from the allocator's own events.

torch's profiler is asked without its Python class, which keeps memory for good of every session: 3 KiB for a step of a small
encoder and 20 KiB in the first hundreds, which adds up over many runs in one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._profiler import ProfilerActivity, ProfilerConfig, ProfilerState, _ExperimentalConfig

# the first step also creates the optimizer's state
FIRST_MEASURED = 2


@dataclass
class MemoryOfAStep:
    """Measure the peak of tensor memory above the level before a step, once a run; changes no number."""

    # bytes; the most that one training step allocated
    peak: int | None = None

    def is_due(self, step: int) -> bool:
        """Tell whether this step is the one of the run whose memory is measured."""
        return step >= FIRST_MEASURED and self.peak is None

    def measured(self, step: int, device: torch.device) -> AbstractContextManager[None]:
        """Measure what is allocated inside, if this step is the one."""
        if not self.is_due(step):
            return nullcontext()
        return self._on_cuda(device) if device.type == "cuda" else self._on_cpu()

    @contextmanager
    def _on_cuda(self, device: torch.device) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield
        self.peak = torch.cuda.max_memory_allocated(device) - before

    @contextmanager
    def _on_cpu(self) -> Iterator[None]:
        config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
        activities = {ProfilerActivity.CPU}
        torch._C._autograd._prepare_profiler(config, activities)
        torch._C._autograd._enable_profiler(config, activities)
        # allocations alone: torch keeps some memory for good of every event of an operator
        torch._C._autograd._enable_record_function(False)
        try:
            yield
        finally:
            torch._C._autograd._enable_record_function(True)
            found = torch._C._autograd._disable_profiler()
        self.peak = peak_of(found.experimental_event_tree())


def peak_of(roots: Any) -> int:
    """Give the most bytes that were held at a time of what this step allocated."""
    events, waiting = [], list(roots)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]":
            events.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    level = peak = 0
    held: set[int] = set()
    for _, place, size in sorted(events, key=lambda found: found[0]):
        if size < 0 and place not in held:
            # what was there before goes when Python comes by: the leftovers of another run change no figure of this one
            continue
        (held.add if size > 0 else held.discard)(place)
        level += size
        peak = max(peak, level)
    return peak
