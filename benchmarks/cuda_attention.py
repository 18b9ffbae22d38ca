"""Attention as one operator on a fake CUDA device, in place of torch's; imported before headwise, which keeps the
function."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

fused = F.scaled_dot_product_attention


# A CPU's build has no fused form for fake tensors.
@torch.library.custom_op("costs::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp."""
    raise NotImplementedError


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("costs::attention_backward", mutates_args=())
def attention_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    raise NotImplementedError


@attention_backward.register_fake
def _(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, mask, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *output, *([] if mask is None else [mask]))


def _backward(ctx: Any, g: Tensor, _: Tensor) -> Any:
    q, k, v, o, lse, *mask = ctx.saved_tensors
    return (*attention_backward(g, q, k, v, o, lse, mask[0] if mask else None, ctx.causal), None, None)


attention.register_autograd(_backward, setup_context=_setup)


def on_cuda(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attend by the operator above on the fake device, and by torch's elsewhere."""
    if q.device.type != "cuda":
        return fused(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return attention(q, k, v, attn_mask, is_causal)[0]


F.scaled_dot_product_attention = on_cuda
