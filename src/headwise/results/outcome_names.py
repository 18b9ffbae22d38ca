"""The names of outcomes: what costs are called, and a name in words."""

from __future__ import annotations

import re

# seconds, bytes, counts and operations: none of them is a quality
COSTS = (
    "seconds_per_step",
    "peak_memory_bytes",
    "parameters",
    "flops_per_step",
    "inference_seconds_per_example",
)
# whether a run diverged: what a claim may be about, though no run writes it as a figure
DIVERGED = "diverged"
# log10 of the learning rate at which runs of a seed begin to diverge along an axis of rates: of sweeps, not of arms
CRITICAL_RATE = "critical_rate"
# how far the parameters that an arm's methods brought along moved from their start, as a root mean square, and the same
# over that of their start: of arms that learn such parameters
MOVED, MOVED_RELATIVE = "methods/moved", "methods/moved_relative"


def words_of(name: str) -> str:
    """Say a name in words: no underscores, no slashes."""
    return re.sub(r"[_/]+", " ", name)


def words_of_rate(name: str) -> str:
    """Say what an outcome rates/<statistic>/rate or rates/<statistic>/fit is, with its unit."""
    _, statistic, kind = name.split("/")
    words = words_of(statistic)
    if kind == "fit":
        return f"R² of an exponential course of {words}"
    return f"exponential rate of {words}, e-folds per 1,000 steps"
