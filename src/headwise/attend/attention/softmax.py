"""The logits of a call, their softmax, and torch's fused attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attend.core import Call
from headwise.borders import flash_on_cpu
from headwise.numerics.masked import allowed_keys, masked_logits

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
