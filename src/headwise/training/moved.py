"""How far the parameters that an arm's methods brought along moved from where they started."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from headwise.results.outcome_names import MOVED, MOVED_RELATIVE


def starts_of(regularized: Any | None) -> dict[str, Tensor]:
    """Return copies of the parameters that methods just brought along, by name."""
    if regularized is None:
        return {}
    known = dict(regularized.model.named_parameters())
    return {name: known[name].detach().clone() for name in regularized.brought}


@torch.no_grad()
def moved(model: nn.Module, starts: dict[str, Tensor]) -> dict[str, float]:
    """Return the root mean square of what these parameters changed by, and the same over that of their start.

    Nothing of an arm whose methods learn nothing; no relative figure of parameters that all start at 0.
    """
    known = dict(model.named_parameters())
    pairs = [(known[name].double(), start.double()) for name, start in starts.items() if name in known]
    many = sum(start.numel() for _, start in pairs)
    if not many:
        return {}
    far = math.fsum(float((now - start).square().sum()) for now, start in pairs)
    whole = math.fsum(float(start.square().sum()) for _, start in pairs)
    found = {MOVED: math.sqrt(far / many)}
    return found | ({MOVED_RELATIVE: math.sqrt(far / whole)} if whole else {})
