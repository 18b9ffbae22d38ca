"""The largest logit of each head, from products of queries and keys alone: no softmax, no values, no T×N matrix."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwise.attend.attention.row_statistics import blocks, masked, part_of_mask
from headwise.numerics.kernels import kernels_run_on, note
from headwise.numerics.operators import calls_are_seen, without_autocast
from headwise.numerics.precision import at_least_fp32


def largest_logits(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    real: Tensor | None = None,
    enough: float = float("-inf"),
) -> Tensor:
    """Return the largest allowed logit of each head and sample, (B, H) in fp32, or -inf without allowed keys.

    It has no gradient.

    Args:
        q, k: (B, H, T, D), (B, H, N, D).
        mask: bool (True: allowed), broadcastable to (B, H, T, N), or None.
        causal: whether query i sees keys 0..i only, in addition to the mask.
        scale: factor of the logits, above 0.
        real: which queries count, bool, broadcastable to (B, T); None for all.
        enough: a number that the caller only compares with: a head whose norms show that none of its logits exceeds
            it may get any number from its largest logit to this one, so that a kernel need not compute its products.
    """
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    note("largest_logits", q)
    inputs = (q.detach(), k.detach(), mask, causal, scale, real, enough)
    found: Tensor = _largest_logits(*inputs) if calls_are_seen(q, k) else _largest(*inputs)
    return found


@torch.library.custom_op("headwise::largest_logits", mutates_args=())
def _largest_logits(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, real: Tensor | None, enough: float
) -> Tensor:
    return _largest(q, k, mask, causal, scale, real, enough)


def _largest(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, real: Tensor | None, enough: float
) -> Tensor:
    # Autocast would compute the products in half precision.
    with without_autocast(q.device):
        if kernels_run_on(q.device):
            from headwise.attend.attention import triton_largest

            if triton_largest.supports(q, k):
                return triton_largest.largest(q, k, mask, causal, scale, real, enough)
        return _in_blocks(q, k, mask, causal, scale, real)


@_largest_logits.register_fake
def _(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, real: Tensor | None, enough: float
) -> Tensor:
    return q.new_empty(q.shape[:2], dtype=torch.float32)


def _in_blocks(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, real: Tensor | None) -> Tensor:
    best = torch.full(q.shape[:2], float("-inf"), device=q.device, dtype=torch.float32)
    if not k.numel() or not q.numel():
        return best
    # Converted here, not in every block.
    q, k = at_least_fp32(q), at_least_fp32(k)
    if k.shape[1] < q.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    parts = blocks(q, k)
    # Reused: allocating a block costs as much as its product.
    memory = q.new_empty(max(math.prod(s.stop - s.start for s in part) for part in parts) * k.shape[2])
    for b, h, t in parts:
        # Causal rows see no later keys.
        n = slice(0, min(t.stop, k.shape[2]) if causal else k.shape[2])
        rows, keys = q[b, h, t].flatten(0, 1), k[b, h, n].flatten(0, 1)
        out = memory[: rows.shape[0] * rows.shape[1] * keys.shape[1]].view(*rows.shape[:2], -1)
        s = torch.bmm(rows, keys.transpose(-1, -2), out=out).view(*q[b, h, t].shape[:3], -1)
        if mask is not None:
            s = masked(s, part_of_mask(mask, b, h, n), causal, t.start)
        elif causal and n.stop > t.start:
            # Only the square on the diagonal has later keys; adding to it is faster than filling it.
            later = torch.full((s.shape[2], n.stop - t.start), float("-inf"), dtype=s.dtype, device=s.device).triu(1)
            s[..., t.start :].add_(later)
        if real is not None:
            counted = real.expand(q.shape[0], q.shape[2])[b, t]
            s = s.amax(-1).masked_fill_(~counted[:, None], float("-inf"))
        best[b, h] = torch.maximum(best[b, h], s.flatten(2).amax(-1).to(best.dtype))
    return best * scale
