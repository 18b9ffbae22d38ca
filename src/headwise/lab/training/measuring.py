"""Costs of a step: time, memory, floating-point operations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from headwise.borders import flash_on_cpu, flash_on_cpu_backward, profiled_memory


def _forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


OF_THE_CPU: dict[Any, Callable[..., int]] = {
    kernel: count
    for kernel, count in ((flash_on_cpu, _forward), (flash_on_cpu_backward, _backward))
    if kernel is not None
}


def _of_saved(saved: list[Any], *_: Any, **__: Any) -> int:
    query, key, value, out = saved[:4]
    return _backward(out, query, key, value)


def _logits(query: Any, key: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(query) * int(key[2])


def _overlap(query: Any, key: Any, *others: Any, **__: Any) -> int:
    # Gradients take as many products of T rows with T rows over N keys again.
    return 2 * math.prod(query[:3]) * int(query[2]) * int(key[2]) * (2 if others[-1] else 1)


def _own() -> dict[Any, Callable[..., int]]:
    """Return the counts of headwise's own operators, in which a counter sees no product.

    Like those of torch's attention they include what causal calls leave out.
    """
    counts: dict[str, Callable[..., int]] = {
        "attend_rows": _forward,
        "attend_rows_backward": lambda *args, **rest: _of_saved(args[1], **rest),
        "attend_with_lse": _forward,
        "attend_with_lse_backward": lambda *args, **rest: _of_saved(args[1], **rest),
        "attend_with_sinks": _forward,
        "attend_with_sinks_backward": lambda *args, **rest: _of_saved(args[1], **rest),
        "attend_dropped": _forward,
        "attend_dropped_backward": lambda *args, **rest: _of_saved(args[1], **rest),
        "attend_edited": _forward,
        "attend_edited_backward": lambda *args, **rest: _of_saved(args[1], **rest),
        "head_overlap": _overlap,
        "largest_logits": _logits,
    }
    # one that is not registered yet is not called either
    ours = torch.ops.headwise
    return {getattr(ours, name): count for name, count in counts.items() if hasattr(ours, name)}


def counter() -> FlopCounterMode:
    """Return a counter of the floating-point operations of matrix products, convolutions and attention."""
    return FlopCounterMode(display=False, custom_mapping={**OF_THE_CPU, **_own()})


# the first step also creates the optimizer's state
FIRST_MEASURED = 2


@dataclass
class MemoryOfAStep:
    """The peak of tensor memory above the level before one step, measured once a run; it changes no number."""

    # bytes that the measured training step allocated at its peak
    peak: int | None = None

    def is_due(self, step: int) -> bool:
        """Return whether memory is measured in this step."""
        return step >= FIRST_MEASURED and self.peak is None

    def measured(self, step: int, device: torch.device) -> AbstractContextManager[None]:
        """Return a context that measures the memory allocated inside it, if this step is due."""
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
        with profiled_memory() as roots:
            yield
        self.peak = peak_of(roots)


def peak_of(roots: Any) -> int:
    """Return the peak number of bytes held at once, of those allocated in this step."""
    events, stack = [], list(roots)
    while stack:
        event = stack.pop()
        stack += event.children
        if event.name == "[memory]":
            events.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    level = peak = 0
    live: set[int] = set()
    for _, place, size in sorted(events, key=lambda event: event[0]):
        if size < 0 and place not in live:
            # memory from before this step, which Python frees at any time: it must not lower this run's figure
            continue
        (live.add if size > 0 else live.discard)(place)
        level += size
        peak = max(peak, level)
    return peak


@dataclass
class Clock:
    """The memory of one step of the run, and the steps of an epoch whose time is not training time."""

    memory: MemoryOfAStep = field(default_factory=MemoryOfAStep)
    apart: dict[str, Any] = field(default_factory=lambda: {"steps": 0, "seconds": 0.0})


def is_read(watch: Any | None) -> bool:
    """Return whether the watch of a run reads the step that comes next."""
    return watch is not None and watch.steps % watch.every == 0


@contextmanager
def counted(clock: Clock, watch: Any | None, device: torch.device, step: int, compiles: bool = False) -> Iterator[bool]:
    """Time step `step` of the run apart from the others if it also compiles, reads or measures: then give True."""
    if not compiles and not is_read(watch) and not clock.memory.is_due(step):
        yield False
        return
    start = now(device)
    with clock.memory.measured(step, device):
        yield True
    clock.apart["steps"] += 1
    clock.apart["seconds"] += now(device) - start


def now(device: torch.device) -> float:
    """Return the seconds of the performance counter after the device has finished its queue."""
    if device.type == "cuda":
        # work queued before belongs to earlier steps
        torch.cuda.synchronize(device)
    return time.perf_counter()
