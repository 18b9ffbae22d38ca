"""Interleaved timing: every variant once per round, medians over rounds, ratios within one run."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable

import torch

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def interleave(
    variants: dict[str, Callable[[], object]], rounds: int, warmup: int = 2, clock: str = "wall"
) -> dict[str, list[float]]:
    """Time each variant once per round, in turn; return the seconds of every round.

    `clock="cpu"` counts the processor time of the process instead, on which other load has little effect.
    """
    now = CLOCKS[clock]
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(warmup + rounds):
        for name, run in variants.items():
            _wait()
            start = now()
            run()
            _wait()
            if turn >= warmup:
                times[name].append(now() - start)
    return times


def _wait() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def ratio(times: dict[str, list[float]], name: str, base: str) -> float:
    """Return the median over rounds of the variant's time divided by the base's time in the same round."""
    return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))


def machine(threads: int) -> str:
    """Return a description of the machine and versions of the measurements."""
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            cpu = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    device = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{cpu}, {threads} thread(s), torch {torch.__version__}, Python {platform.python_version()}{device}"
