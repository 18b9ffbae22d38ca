"""Masked: which keys a mask lets a query see, and the logits that a softcap and a mask leave of products."""

from __future__ import annotations

import torch
from torch import Tensor

# Float masks say "not allowed" with -1e4, -1e9, the lowest number of a dtype or -inf: what is not above this is not
# allowed. Biases of positions are allowed keys: ALiBi, of at most one nat per token, comes here after 9000 tokens,
# where its weight has long been 0.
MASKED = -9.0e3

# Between the regions of a shifted window Swin adds -100 instead. That is a fact of such hosts alone: elsewhere -100 may
# be a bias. Half of it leaves room for the bias of positions that stands in the same mask.
APART = -50.0


def hide_other_regions(mask: Tensor) -> Tensor:
    """Return the additive mask of a shifted window with -inf where it keeps regions apart."""
    return mask.masked_fill(mask < APART, float("-inf"))


def visible(mask: Tensor) -> Tensor:
    """Return where a mask, bool or additive, lets a key be seen, bool of its shape."""
    return mask if mask.dtype == torch.bool else mask > MASKED


def allowed_keys(mask: Tensor | None, causal: bool, queries: slice, keys: int, device: torch.device) -> Tensor | None:
    """Return which keys each of some queries may see, bool (B|1, H|1, T|1, N), or None where all may see all."""
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


def masked_logits(
    products: Tensor,
    mask: Tensor | None = None,
    allowed: Tensor | None = None,
    *,
    softcap: float | None = None,
    forbidden: float = float("-inf"),
) -> Tensor:
    """Return the logits that scaled products (B, H, t, N) of queries and keys come to; the products' memory is used for
    them.

    Args:
        products: scaled already; where they have a gradient, so have the logits.
        mask: what is added where it is additive; a bool one is part of `allowed`.
        allowed: which keys each query may see, bool, broadcastable to the products; None where no key is cut off.
        softcap: the host's c of c * tanh(s / c).
        forbidden: the logit of a key that is cut off.
    """
    s = products
    # As Gemma 2 does: capped before the mask, for tanh would make -inf a finite logit.
    if softcap is not None:
        # The gradient of tanh needs its result as it is.
        s = softcap * torch.tanh(s / softcap) if s.requires_grad else s.div_(softcap).tanh_().mul_(softcap)
    if mask is not None and mask.dtype != torch.bool:
        s = s.add_(mask.to(s.dtype))
    return s if allowed is None else s.masked_fill_(~allowed, forbidden)
