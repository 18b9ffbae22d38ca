"""How much tensor memory one training step takes, read from the allocator's own events.

On the CPU they come from the older of torch's two profilers: the other one keeps some memory for good of every session, 17 KiB
for a step of a small encoder, which over hundreds of runs in one process adds up.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

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
        collects = gc.isenabled()
        # the leftovers of another run must not go in the middle of the step
        gc.disable()
        state = (ProfilerState.CPU, False, True, False, False, False)
        torch._C._autograd._enable_profiler_legacy(ProfilerConfig(*state, _ExperimentalConfig()))
        # allocations alone, without the operators that they belong to
        torch._C._autograd._enable_record_function(False)
        try:
            yield
        finally:
            torch._C._autograd._enable_record_function(True)
            threads = torch._C._autograd._disable_profiler_legacy()
            if collects:
                gc.enable()
        self.peak = peak_of(threads)


def peak_of(threads: list[list[Any]]) -> int:
    """Give the most bytes that were held at a time of what a step allocated, from the profiler's events of every thread."""
    events = [event for events in threads for event in events]
    if len([events for events in threads if events]) > 1:
        events.sort(key=events[0].cpu_elapsed_us)
    level = peak = 0
    held: Counter[int] = Counter()
    for size in (event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc"):
        if size < 0 and not held[-size]:
            # of what was there before the step
            continue
        held[abs(size)] += 1 if size > 0 else -1
        level += size
        peak = max(peak, level)
    return peak
