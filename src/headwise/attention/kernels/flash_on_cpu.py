"""The CPU's private flash kernel: it takes causality and a mask at once, and gives the log-sum-exp of each row."""

from __future__ import annotations

import torch
from torch import Tensor

NAME = "_scaled_dot_product_flash_attention_for_cpu"


def has_flash() -> bool:
    """Return whether this build of torch has the kernel."""
    return hasattr(torch.ops.aten, NAME)


def flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return (A v, log-sum-exp of each row) for q (B, H, T, D), k (B, H, N, D), v (B, H, N, D) and a mask that is
    added."""
    # It takes the numbers of a row to lie side by side, and does not ask.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out, lse = getattr(torch.ops.aten, NAME)(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse
