"""Sums of penalties over calls and processes."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.core import Method, MethodState, Site
from headwise.attend.core.method_state import strengths_on
from headwise.attend.core.unread_penalties import Entry


def joint_mean(entries: list[Entry], device: torch.device, *, alone: bool = False) -> Tensor:
    """Return the sum of penalties, each a (sum, count) pair, as a mean over the joined batch of all processes.

    A process contributes its sum divided by the total count and multiplied by the number of processes. Data parallelism
    averages gradients, so that the average equals the penalty of one process with the joined batch.

    With `alone` it is the mean over the batch of this process, because others may have none.
    """
    # In compiled graphs, a 0-d CPU tensor tells at run time whether a call was a repetition.
    entries = [e for e in entries if not (isinstance(e.again, Tensor) and bool(e.again))]
    if not entries:
        return torch.zeros((), device=device, dtype=torch.float32)
    # Sums of squares come last, so that a slice selects them: a mask would synchronize with the device.
    entries.sort(key=lambda entry: entry.strength is not None)
    plain = sum(entry.strength is None for entry in entries)
    sums = torch.stack([e.total.to(device) for e in entries])
    counts = torch.stack([e.weight.to(device) for e in entries]).detach()
    squares, world = sums[plain:], 1
    if not alone and torch.distributed.is_available() and torch.distributed.is_initialized():
        world = torch.distributed.get_world_size()
    if world > 1:
        torch.distributed.all_reduce(counts)
        if plain < len(entries):
            others = squares.detach().clone()
            torch.distributed.all_reduce(others)
            # The root is over the squares of all processes; each process adds its own gradient.
            squares = squares + (others - squares.detach())
    # A call without real queries adds 0 to sum and count.
    counts = counts.clamp(min=1)
    means = (sums[:plain] * world / counts[:plain]).sum() if plain else None
    if means is not None and plain == len(entries):
        return means
    strengths = strengths_on([e.strength for e in entries if e.strength is not None], device)
    norms = (strengths * squares.sqrt() / counts[plain:]).sum()
    if world > 1:
        # Each process holds only its part of a norm's gradient, and gradients are averaged: it counts `world` times.
        norms = norms + (world - 1) * (norms - norms.detach())
    return norms if means is None else means + norms


def of_weights(fitted: list[FittedLayer], device: torch.device) -> Tensor | None:
    """Return the sum of the penalties on weights, which need no forward; None if no method has one."""
    terms = [
        term.to(device)
        for method, fits in by_method(fitted)
        if method.overrides("penalty")
        for term in method.penalties(fits)
    ]
    return torch.stack(terms).sum() if terms else None


def by_method(fitted: list[FittedLayer]) -> list[tuple[Method, list[tuple[Site, MethodState]]]]:
    """Return each method with the sites that it is fitted on and its states there, in the order of the methods."""
    found: dict[int, tuple[Method, list[tuple[Site, MethodState]]]] = {}
    for f in fitted:
        for method, state in zip(f.methods, f.states, strict=True):
            found.setdefault(id(method), (method, []))[1].append((f.site, state))
    return list(found.values())
