"""The logits of a call, their softmax, and the fused function that computes both in one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.kernels.flash_on_cpu import flash, has_flash
from headwise.core.call import Call
from headwise.core.masked import allowed_keys, masked_logits

# The host's own function, kept before a host adapter may stand in its place.
fused = F.scaled_dot_product_attention


def takes_causal_and_mask() -> bool:
    """Return whether the kernel of `fused_causal` is there and is the one that the public function would take now."""
    # Compiled graphs cannot ask which kernels are allowed.
    if torch.compiler.is_compiling():
        return False
    # Autocast and the choice of kernels (second derivatives have none but the plain one) are heeded by the public
    # function alone.
    heeded = torch.is_autocast_enabled("cpu") or not torch.backends.cuda.flash_sdp_enabled()
    return has_flash() and not heeded


def fused_causal(q: Tensor, k: Tensor, v: Tensor, columns: Tensor, scale: float) -> Tensor:
    """Return causal attention on a CPU with what is added to the logits of each key, (B, H, 1, N): the kernel behind
    `fused`."""
    return flash(q, k, v, columns, True, scale)[0]


def logits(call: Call, q: Tensor, k: Tensor) -> Tensor:
    """Return the logits (B, H, T, N) in fp32 or wider: scaled, soft-capped as the host does, masked with -inf."""
    s = q @ k.transpose(-1, -2) * call.scale
    s = s.float() if s.dtype in (torch.float16, torch.bfloat16) else s
    return masked_logits(s, call.mask, _cut(call), softcap=call.softcap)


def _cut(call: Call) -> Tensor | None:
    """Return which keys are not cut off: an additive mask is added with its own values, so that only causality cuts."""
    if call.mask is None or call.mask.dtype == torch.bool:
        return call.allowed()
    at_hand = slice(0, call.queries) if call.query_block is None else call.query_block
    return allowed_keys(None, call.causal, at_hand, call.keys, call.q.device)


def normalize(s: Tensor, sinks: Tensor | None = None, empty: bool = False) -> Tensor:
    """Return the softmax of logits over keys; a row without any allowed key gives 0, as the fused kernel does."""
    if sinks is not None:
        column = sinks.to(s.dtype).view(1, -1, 1, 1).expand(s.shape[0], s.shape[1], s.shape[2], 1)
        return torch.cat([s, column], dim=-1).softmax(-1)[..., :-1]
    if not empty:
        return s.softmax(-1)
    # The softmax of a row of -inf is nan, and its gradient too: such a row is computed as zeros and taken out
    # afterwards.
    none = (s == float("-inf")).all(-1, keepdim=True)
    return s.masked_fill(none, 0.0).softmax(-1).masked_fill(none, 0.0)
