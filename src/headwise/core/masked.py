"""Masked: what an additive mask adds at least to a key that a query may see, and which keys that leaves."""

from __future__ import annotations

import torch
from torch import Tensor

# Float masks say "not allowed" with -1e4, -1e9, the lowest number of a dtype or -inf: what is not above this is not allowed. Biases
# of positions are allowed keys: ALiBi, of at most one nat per token, comes here after 9000 tokens, where its weight has long been 0.
MASKED = -9.0e3

# Between the regions of a shifted window Swin adds -100 instead. That is a fact of such hosts alone: elsewhere -100 may be a bias.
# Half of it leaves room for the bias of positions that stands in the same mask.
APART = -50.0


def hide_other_regions(mask: Tensor) -> Tensor:
    """Give the additive mask of a shifted window with -inf where it keeps regions apart."""
    return mask.masked_fill(mask < APART, float("-inf"))


def visible(mask: Tensor) -> Tensor:
    """Give where a mask, bool or additive, lets a key be seen, bool of its shape."""
    return mask if mask.dtype == torch.bool else mask > MASKED


def allowed_keys(mask: Tensor | None, causal: bool, queries: slice, keys: int, device: torch.device) -> Tensor | None:
    """Give which keys each of some queries may see, bool (B|1, H|1, T|1, N), or None where all may see all."""
    allowed = None
    if mask is not None:
        allowed = visible(mask)
        while allowed.dim() < 4:
            allowed = allowed.unsqueeze(0)
    if not causal:
        return allowed
    # Queries of a block are counted from the start of their call, as keys are.
    query = torch.arange(queries.start, queries.stop, device=device)[:, None]
    order = (torch.arange(keys, device=device) <= query)[None, None]
    return order if allowed is None else allowed & order
