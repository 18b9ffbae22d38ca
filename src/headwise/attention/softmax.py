"""The logits of a call, their softmax, and the fused function that computes both in one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.kernels.flash_on_cpu import flash, has_flash
from headwise.core.call import Call

# The host's own function, kept before a host adapter may stand in its place.
fused = F.scaled_dot_product_attention


def takes_causal_and_mask() -> bool:
    """Tell whether the kernel of `fused_causal` is there and is the one that the public function would take now."""
    # Compiled graphs cannot ask which kernels are allowed.
    if torch.compiler.is_compiling():
        return False
    # Autocast and the choice of kernels (second derivatives have none but the plain one) are heeded by the public function alone.
    heeded = torch.is_autocast_enabled("cpu") or not torch.backends.cuda.flash_sdp_enabled()
    return has_flash() and not heeded


def fused_causal(q: Tensor, k: Tensor, v: Tensor, columns: Tensor, scale: float) -> Tensor:
    """Give causal attention on a CPU with what is added to the logits of each key, (B, H, 1, N): the kernel behind `fused`."""
    return flash(q, k, v, columns, True, scale)[0]


def logits(call: Call, q: Tensor, k: Tensor) -> Tensor:
    """Give the logits (B, H, T, N) in fp32 or wider: scaled, soft-capped as the host does, masked with -inf."""
    s = q @ k.transpose(-1, -2) * call.scale
    s = s.float() if s.dtype in (torch.float16, torch.bfloat16) else s
    # As Gemma 2 does: capped before the mask, for tanh would make -inf a finite logit.
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    if call.mask is not None and call.mask.dtype != torch.bool:
        s = s + call.mask
    if call.causal or (call.mask is not None and call.mask.dtype == torch.bool):
        s = s.masked_fill(~_hard(call), float("-inf"))
    return s


def _hard(call: Call) -> Tensor:
    allowed = call.allowed()
    assert allowed is not None
    # An additive mask is in the sum already, with its own values: only causality is still to be cut off.
    if call.causal and call.mask is not None and call.mask.dtype != torch.bool:
        start = 0 if call.query_block is None else call.query_block.start
        query = torch.arange(start, start + call.queries, device=call.q.device)[:, None]
        return (torch.arange(call.keys, device=call.q.device) <= query)[None, None]
    return allowed


def normalize(s: Tensor, sinks: Tensor | None = None, empty: bool = False) -> Tensor:
    """Give the softmax of logits over keys; a row without any allowed key gives 0, as the fused kernel does."""
    if sinks is not None:
        column = sinks.to(s.dtype).view(1, -1, 1, 1).expand(s.shape[0], s.shape[1], s.shape[2], 1)
        return torch.cat([s, column], dim=-1).softmax(-1)[..., :-1]
    if not empty:
        return s.softmax(-1)
    # The softmax of a row of -inf is nan, and its gradient too: such a row is computed as zeros and taken out afterwards.
    none = (s == float("-inf")).all(-1, keepdim=True)
    return s.masked_fill(none, 0.0).softmax(-1).masked_fill(none, 0.0)
