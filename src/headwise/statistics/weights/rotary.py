"""Rotary pairs: which rows of queries and keys a rotary position turns into each other."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from headwise.core.site import Site


def rotary_pairs(site: Site, size: int) -> Tensor:
    """Give the pairs (pairs, 2) of a head's rows; rows that are not turned stand as (row, row).

    The host's own `rotate_half` is asked how it pairs; without one, halves are paired, as most hosts do.
    """
    turned = _turned(site, size)
    half = turned // 2
    first = torch.arange(0, turned, 2) if _neighbours(site) else torch.arange(half)
    second = first + 1 if _neighbours(site) else first + half
    alone = torch.arange(turned, size)
    return torch.stack([torch.cat([first, alone]), torch.cat([second, alone])], dim=1)


def _neighbours(site: Site) -> bool:
    space = vars(sys.modules[type(site.module).__module__])
    if "rotate_every_two" in space:
        return True
    rotate = space.get("rotate_half")
    # Halves: (1, 2, 3, 4) -> (-3, -4, 1, 2). Neighbours: (-2, 1, -4, 3).
    return rotate is not None and float(rotate(torch.tensor([1.0, 2.0, 3.0, 4.0]))[0]) == -2.0


def _turned(site: Site, size: int) -> int:
    config = getattr(site.module, "config", None)
    share = _first(getattr(site.module, "partial_rotary_factor", None), _setting(config))
    return size if share is None else int(size * share) // 2 * 2


def _setting(config: Any) -> float | None:
    inner = getattr(config, "rope_parameters", None)
    inside = inner.get("partial_rotary_factor") if isinstance(inner, dict) else None
    return _first(inside, getattr(config, "partial_rotary_factor", None), getattr(config, "rotary_pct", None))


def _first(*values: float | None) -> float | None:
    return next((float(v) for v in values if isinstance(v, int | float)), None)
