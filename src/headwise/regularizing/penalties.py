"""Penalties: sums of penalties over calls and processes."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attention.fitted_layer import FittedLayer
from headwise.core.shared_state import Entry


def joint_mean(entries: list[Entry], device: torch.device) -> Tensor:
    """Sum penalties, each a (sum, count) pair, as the mean over the joined batch of all processes.

    A process's share is its sum over the count of all, times their number: data parallelism averages gradients, so
    that what it averages is the penalty of one process with the joined batch.
    """
    # Inside compiled graphs whether a call was a repetition is only known when it runs: a 0-d CPU tensor.
    entries = [e for e in entries if not (isinstance(e[2], Tensor) and bool(e[2]))]
    if not entries:
        return torch.zeros((), device=device)
    # Sums of squares stand last, so that a slice finds them: a mask would ask the device how many it holds.
    entries.sort(key=lambda entry: entry[3] is not None)
    plain = sum(entry[3] is None for entry in entries)
    sums = torch.stack([e[0].to(device) for e in entries])
    counts = torch.stack([e[1].to(device) for e in entries]).detach()
    squares, world = sums[plain:], 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world = torch.distributed.get_world_size()
    if world > 1:
        torch.distributed.all_reduce(counts)
        if plain < len(entries):
            others = squares.detach().clone()
            torch.distributed.all_reduce(others)
            # The squares of the other processes belong under the root; their gradient comes from themselves.
            squares = squares + (others - squares.detach())
    # A call in which no query is real adds 0 to both.
    counts = counts.clamp(min=1)
    means = (sums[:plain] * world / counts[:plain]).sum()
    if plain == len(entries):
        return means
    strengths = torch.stack([e[3].to(device, non_blocking=True) for e in entries if e[3] is not None])
    norms = (strengths * squares.sqrt() / counts[plain:]).sum()
    # Gradients are averaged over processes, and each holds its own part of a norm's: its gradient counts `world` times.
    return means + norms + (world - 1) * (norms - norms.detach())


def of_weights(fitted: list[FittedLayer], device: torch.device) -> Tensor:
    """Sum the penalties that methods put on weights, which need no forward."""
    terms = [
        method.penalty(f.site, state).to(device)
        for f in fitted
        for method, state in zip(f.methods, f.states, strict=True)
        if method.overrides("penalty")
    ]
    return torch.stack(terms).sum() if terms else torch.zeros((), device=device)
