"""The logits of a call, their softmax, torch's fused attention, and the largest logits of each head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.row_statistics import logits_block, spans
from headwise.borders import flash_on_cpu
from headwise.core.call import Call
from headwise.core.masked import allowed_keys, masked_logits
from headwise.core.precision import at_least_fp32

# torch's own function, saved before a host adapter may replace it.
fused = F.scaled_dot_product_attention


def takes_causal_and_mask() -> bool:
    """Return whether the kernel of `fused_causal` exists and the public function would choose it now."""
    # Compiled graphs cannot ask which kernels are enabled.
    if torch.compiler.is_compiling():
        return False
    # Only the public function respects autocast and disabled kernels (second derivatives need the math kernel).
    needs_public = torch.is_autocast_enabled("cpu") or not torch.backends.cuda.flash_sdp_enabled()
    return has_flash() and not needs_public


def fused_causal(q: Tensor, k: Tensor, v: Tensor, columns: Tensor, scale: float) -> Tensor:
    """Return causal attention on a CPU with `columns` (B, H, 1, N) added to the logits."""
    return flash(q, k, v, columns, True, scale)[0]


def logits(call: Call, q: Tensor, k: Tensor) -> Tensor:
    """Return the logits (B, H, T, N) in fp32 or wider: scaled, soft-capped like the host's, masked with -inf."""
    s = q @ k.transpose(-1, -2) * call.scale
    s = s.float() if s.dtype in (torch.float16, torch.bfloat16) else s
    return masked_logits(s, call.mask, _keys_to_keep(call), softcap=call.softcap)


def _keys_to_keep(call: Call) -> Tensor | None:
    """Return which keys do not get -inf. An additive mask is added to the logits, so only causality applies here."""
    if call.mask is None or call.mask.dtype == torch.bool:
        return call.allowed()
    queries = slice(0, call.queries) if call.query_block is None else call.query_block
    return allowed_keys(None, call.causal, queries, call.keys, call.q.device)


def normalize(s: Tensor, sinks: Tensor | None = None, empty: bool = False) -> Tensor:
    """Return the softmax of logits over keys, with `empty` 0 in rows without allowed keys, like the fused kernel."""
    if sinks is not None:
        column = sinks.to(s.dtype).view(1, -1, 1, 1).expand(s.shape[0], s.shape[1], s.shape[2], 1)
        return torch.cat([s, column], dim=-1).softmax(-1)[..., :-1]
    if not empty:
        return s.softmax(-1)
    # The softmax of a row of -inf and its gradient are nan, so such rows are set to 0 before and after.
    none = (s == float("-inf")).all(-1, keepdim=True)
    return s.masked_fill(none, 0.0).softmax(-1).masked_fill(none, 0.0)


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
