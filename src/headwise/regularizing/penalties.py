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
    sums = torch.stack([e[0].to(device) for e in entries])
    counts = torch.stack([e[1].to(device) for e in entries]).detach()
    world = 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world = torch.distributed.get_world_size()
    root = torch.tensor([e[3] is not None for e in entries], device=device)
    if world > 1:
        torch.distributed.all_reduce(counts)
        if any(e[3] is not None for e in entries):
            others = sums.detach().clone()
            torch.distributed.all_reduce(others)
            # The squares of the other processes belong under the root; their gradient comes from themselves.
            sums = torch.where(root, sums + (others - sums.detach()), sums)
    # A call in which no query is real adds 0 to both.
    counts = counts.clamp(min=1)
    means = (sums * world / counts).masked_fill(root, 0.0).sum()
    if all(e[3] is None for e in entries):
        return means
    strengths = torch.stack([e[3].to(device) for e in entries if e[3] is not None])
    norms = (strengths * sums[root].sqrt() / counts[root]).sum()
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
