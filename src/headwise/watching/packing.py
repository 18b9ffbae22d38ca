"""One collective per reading: every rank's tallies packed into one vector, gathered, and joined as each figure
joins."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headwise.statistics import Tally

Tallies = dict[int, dict[str, Tally]]


def ranks() -> int:
    """Return the number of processes that train together."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def rank() -> int:
    """Return this process's place among those that train together."""
    return torch.distributed.get_rank() if ranks() > 1 else 0


def is_first() -> bool:
    """Return whether this process is the one that writes logs."""
    return rank() == 0


def joined(tallies: Tallies, layout: dict[int, dict[str, tuple[int, ...]]], device: torch.device) -> Tallies:
    """Join the tallies of all ranks by one all-gather: sums and weights add up, maxima reduce as maxima.

    Args:
        layout: the shape of every figure that any rank may have, the same on all ranks.
    """
    if ranks() == 1:
        return tallies
    own = torch.cat([_pack(tallies.get(site, {}).get(name), shape) for site, name, shape in _each(layout)]).to(device)
    every = own.new_empty(ranks() * own.numel())
    torch.distributed.all_gather_into_tensor(every, own)
    result: Tallies = {}
    for vector in every.view(ranks(), -1).cpu():
        offset = 0
        for site, name, shape in _each(layout):
            tally, offset = _unpack(vector, offset, name, shape)
            if tally is None:
                continue
            known = result.setdefault(site, {})
            known[name] = known[name].add(tally) if name in known else tally
    return result


def _each(layout: dict[int, dict[str, tuple[int, ...]]]) -> list[tuple[int, str, tuple[int, ...]]]:
    return [(site, name, shape) for site, names in sorted(layout.items()) for name, shape in sorted(names.items())]


KINDS = ("mean", "max", "min")


def _pack(tally: Tally | None, shape: tuple[int, ...]) -> Tensor:
    """Lay out (present, kind, sampled, has spread) and three numbers per entry."""
    size = torch.Size(shape).numel()
    if tally is None:
        return torch.zeros(4 + 3 * size, dtype=torch.float64)
    spread = torch.zeros(size) if tally.spread is None else tally.spread.flatten()
    head = torch.tensor(
        [1.0, float(KINDS.index(tally.kind)), float(tally.sampled), float(tally.spread is not None)],
        dtype=torch.float64,
    )
    parts = (tally.total.flatten(), tally.weight.flatten(), spread)
    return torch.cat([head, *(part.to("cpu", torch.float64) for part in parts)])


def _unpack(vector: Tensor, offset: int, name: str, shape: tuple[int, ...]) -> tuple[Tally | None, int]:
    size = torch.Size(shape).numel()
    end = offset + 4 + 3 * size
    present, kind, sampled, spread = vector[offset : offset + 4].tolist()
    if not present:
        return None, end
    total, weight, variance = vector[offset + 4 : end].view(3, *shape).unbind()
    tally = Tally(total, weight, None, bool(sampled), KINDS[int(kind)])
    return replace(tally, spread=variance) if spread else tally, end
