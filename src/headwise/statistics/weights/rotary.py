"""Rotary pairs: which rows of queries and keys a rotary position turns into each other."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from headwise.core.site import Site
from headwise.hosts.layers.code import forward_of, names_used, reached


def rotary_pairs(site: Site, size: int) -> Tensor:
    """Return the pairs (pairs, 2) of a head's rows; rows that are not turned stand as (row, row).

    The function by which the layer's own code turns is asked how it pairs; without one, halves are paired, as most
    hosts do.
    """
    turned = _turned(site, size)
    half = turned // 2
    first = torch.arange(0, turned, 2) if _neighbours(site) else torch.arange(half)
    second = first + 1 if _neighbours(site) else first + half
    alone = torch.arange(turned, size)
    return torch.stack([torch.cat([first, alone]), torch.cat([second, alone])], dim=1)


def _neighbours(site: Site) -> bool:
    module = site.module
    # timm's layers keep which of the two they apply; its function, and copies of it, say so by the default of `half`.
    declared = getattr(module, "rotate_half", None)
    if isinstance(declared, bool):
        return not declared
    for function in reached(forward_of(module), type(module), 3):
        half = inspect.signature(function).parameters.get("half")
        if half is not None and isinstance(half.default, bool):
            return not half.default
        if "view_as_complex" in names_used(function):
            # A complex number is made of two numbers that lie side by side.
            return True
        if "rot" in function.__name__ and (first := _first_turned(function)) is not None:
            return first == -2.0
    return False


def _first_turned(function: Any) -> float | None:
    """Ask a function how it turns: halves, (1, 2, 3, 4) -> (-3, -4, 1, 2), or neighbours, (-2, 1, -4, 3); None for
    another one."""
    try:
        turned = function(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    except Exception:
        return None
    known = ([-3.0, -4.0, 1.0, 2.0], [-2.0, 1.0, -4.0, 3.0])
    return turned.tolist()[0] if isinstance(turned, Tensor) and turned.tolist() in known else None


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
