"""Ledger: sums of penalties over calls and processes, and what loading weights must explain."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .regularize import Regularized


# (sum, count, whether the call repeats an earlier one, whether the sum is one of squares under a root)
Entry = tuple[Tensor, Tensor, Any, bool]


def total(entries: list[Entry], device: torch.device) -> Tensor:
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
    root = torch.tensor([e[3] for e in entries], device=device)
    if world > 1:
        torch.distributed.all_reduce(counts)
        if any(e[3] for e in entries):
            others = sums.detach().clone()
            torch.distributed.all_reduce(others)
            # The squares of the other processes belong under the root; their gradient comes from themselves.
            sums = torch.where(root, sums + (others - sums.detach()), sums)
    counts = counts.clamp(min=1)
    means = (sums * world / counts).masked_fill(root, 0.0).sum()
    if not any(e[3] for e in entries):
        return means
    norms = (sums[root].sqrt() / counts[root]).sum()
    return means + norms + (world - 1) * (norms - norms.detach())


def own_keys(handle: Regularized) -> list[str]:
    """Give the state-dict keys that the methods brought along."""
    return [k for k in handle.model.state_dict() if ".headwise." in f".{k}" or "parametrizations." in k]


def explain_loading(handle: Regularized, state: dict[str, Any], prefix: str, strict: bool, errors: list[str]) -> None:
    """Explain why plain weights do not fit a regularized model."""
    missing = [k for k in own_keys(handle) if prefix + k not in state]
    if not missing:
        return
    text = (
        f"these weights are those of a plain model, and this one is regularized with "
        f"{' + '.join(map(repr, handle.methods))}: {missing[0]} and {len(missing) - 1} more are missing. Load the weights "
        "before regularize(), or call remove() (remove(discard=True) after training) first. The other way round, call fold() "
        "before saving, so that plain models can load what can be folded"
    )
    if strict:
        errors.append(text)
    else:
        warnings.warn(text, stacklevel=2)
