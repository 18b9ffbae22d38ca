"""torch's flash kernel for CPUs, and the largest logits of each head, from its log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attention.kernels.row_statistics import logits_block, spans
from headwise.borders import flash_on_cpu
from headwise.core.precision import at_least_fp32


def has_flash() -> bool:
    """Return whether this build of torch has the kernel."""
    return flash_on_cpu is not None


def flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return (A v, log-sum-exp of each row) for q (B, H, T, D), k and v (B, H, N, D) and an additive mask."""
    # The kernel assumes, without a check, that the numbers of a row are contiguous.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out, lse = flash_on_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse


# logsumexp(SHARP * s) / SHARP exceeds max(s) by at most log(N) / SHARP: below the rounding of s itself.
SHARP = 1e8

# Entries of one block of logits: 16 MiB on a CPU; 256 MiB on other devices, whose kernels need larger blocks.
ENTRIES_ON_CPU, ENTRIES = 1 << 22, 1 << 26


def largest_logits(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, real: Tensor | None = None
) -> Tensor:
    """Return the largest allowed logit of each head and sample, (B, H) in fp32, or -inf without allowed keys.

    It has no gradient.

    Args:
        q, k: (B, H, T, D), (B, H, N, D).
        mask: bool (True: allowed), broadcastable to (B, H, T, N), or None.
        causal: whether query i sees keys 0..i only, in addition to the mask.
        scale: factor of the logits, above 0.
        real: which queries count, bool, broadcastable to (B, T); None for all.
    """
    with torch.no_grad():
        q, k = q.detach(), k.detach()
        bias = None
        if mask is not None:
            if causal:
                mask, causal = mask & _order(q, k), False
            bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, float("-inf"))
        lse = _log_sum_exp(q, k, bias, causal, scale * SHARP)
        if lse is None:
            return _in_blocks(q, k, mask, causal, scale, real)
        if mask is not None:
            # Kernels differ in their result for rows without allowed keys.
            lse = lse.masked_fill(~mask.any(-1), float("-inf"))
        if real is not None:
            lse = lse.masked_fill(~real[:, None], float("-inf"))
        return lse.amax(-1).float() / SHARP


def _order(q: Tensor, k: Tensor) -> Tensor:
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()


def _log_sum_exp(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor | None:
    """Return the log-sum-exp of each row, (B, H, T), from torch's CPU kernel, or None if it cannot be used.

    The CPU kernel scales the logits before it takes their maximum. The CUDA kernel scales them in the exponent, which
    overflows at SHARP.
    """
    shared = q.dim() == 4 and q.shape[1] == k.shape[1] and q.dtype == k.dtype
    if shared and q.device.type == "cpu" and has_flash():
        return flash(q, k, k, bias, causal, scale)[1]
    return None


def _in_blocks(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, real: Tensor | None) -> Tensor:
    best = torch.full(q.shape[:2], float("-inf"), device=q.device)
    # Converted here, not in every block.
    q, k = at_least_fp32(q), at_least_fp32(k)
    for rows in spans(q, k, ENTRIES_ON_CPU if q.device.type == "cpu" else ENTRIES):
        logits = logits_block(q[:, :, rows], k, mask, causal, scale, rows.start)
        if real is not None:
            real_rows = real if real.shape[1] == 1 else real[:, rows]
            logits = logits.masked_fill(~real_rows[:, None, :, None], float("-inf"))
        best = torch.maximum(best, logits.amax((-1, -2)))
    return best
