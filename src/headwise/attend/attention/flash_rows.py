"""Attention and the log-sum-exp of its rows at the cost of fused attention, whose kernels compute both.

torch's fused kernels return the log-sum-exp L, but take no gradient of it. Their backward computes the gradient of the
logits as P (dO V^T - <dO, O>), and with a gradient g of L it should be P (dO V^T - <dO, O> + g): the same call gives
it, if instead of O it gets O - dO g / |dO|², whose product with dO is <dO, O> - g. A row with dO = 0 has no such
output, and gets a dO so small that nothing but g is left of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.attend.attention.row_statistics import attend_whole, gradients_of
from headwise.attend.attention.second_derivatives import gradients, rows_by_matrix
from headwise.attend.attention.softmax import flash, has_flash
from headwise.borders import flash_on_cpu_backward, flash_on_cuda, flash_on_cuda_backward
from headwise.numerics.kernels import kernels_run_on
from headwise.numerics.operators import AttentionOperator, rows_like, without_autocast
from headwise.numerics.precision import at_least_fp32

# The length of dO in rows where it is 0. Its inverse times a gradient stays within the range of bf16 and fp32.
TINY = 1e-18


def attend_with_lse(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return A v and the log-sum-exp of each row: the first two results of `attend_rows`, and their gradients.

    By torch's flash kernels where `flash_takes` the call, else by `attend_rows`' own forms. The arguments are those of
    `attend_rows`.
    """
    found: tuple[Tensor, Tensor] = _operator(q, k, v, mask, causal, scale)
    return found


def flash_takes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, *, fp16: bool = False) -> bool:
    """Return whether torch's flash kernels compute this call with its log-sum-exp, and its gradients by one call.

    Args:
        q, k, v, mask, causal: as in `attend_with_lse`.
        fp16: whether fp16 counts. With a gradient of the log-sum-exp, that of a row with dO = 0 would leave its range.
    """
    if mask is not None or q.shape != v.shape or k.shape != v.shape or q.numel() == 0:
        return False
    if not q.dtype == k.dtype == v.dtype or not torch.backends.cuda.flash_sdp_enabled():
        return False
    if q.device.type == "cpu":
        known = q.dtype in (torch.float32, torch.float64, torch.bfloat16)
        return known and has_flash() and flash_on_cpu_backward is not None
    halves = (torch.bfloat16, torch.float16) if fp16 else (torch.bfloat16,)
    fits = q.dtype in halves and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    # Cards before Ampere have no flash kernel.
    return fits and flash_on_cuda is not None and torch.cuda.get_device_capability(q.device)[0] >= 8


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if not flash_takes(q, k, v, mask, causal):
        return attend_whole(q, k, v, mask, causal, scale)[:2]
    return by_flash(q, k, v, causal, scale)


def by_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return A v and the log-sum-exp of each row, of a call that `flash_takes`."""
    if q.device.type == "cpu":
        out, lse = flash(q, k, v, None, causal, scale)
    else:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        out, lse, *_ = flash_on_cuda(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse.contiguous()


def flash_gradients(
    g_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v by torch's flash kernels, with P = exp(logits - lse).

    Args:
        g_out: gradient dO of the output, (B, H, T, D).
        q, k, v, causal, scale: of the call, which `flash_takes`.
        out: the rows whose product with dO is subtracted from dO V^T, (B, H, T, D); the output itself, if lse is that
            of the call.
        lse: what the logits are lowered by, (B, H, T).
    """
    q, k, v, g_out = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, g_out))
    if q.device.type == "cpu":
        dq, dk, dv = flash_on_cpu_backward(g_out, q, k, v, out, lse, 0.0, causal, scale=scale)
        return dq, dk, dv
    # Without dropout its random state is not read; without lengths of sequences there are none.
    unread = torch.empty(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = flash_on_cuda_backward(
        g_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unread, unread, scale=scale
    )
    return dq, dk, dv


def _gradients_of(
    grads: Sequence[Tensor | None], saved: list[Tensor], mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    (g_out, g_lse), (q, k, v, out, lse) = grads, saved
    if not flash_takes(q, k, v, mask, causal):
        # Entropies and squares are read with their gradients only.
        return gradients_of((g_out, g_lse, None, None), [*saved, lse, lse], mask, causal, scale)
    g_out = torch.zeros_like(out) if g_out is None else g_out
    if g_lse is not None:
        with without_autocast(q.device):
            g_out, out = carry(g_out, out, g_lse)
    return flash_gradients(g_out, q, k, v, out, lse, causal, scale)


def carry(g_out: Tensor, out: Tensor, g_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return dO and an output O' with <dO, O'> = <dO, O> - g_lse in each row; dO differs from the given where it is 0.

    g_out and out are (B, H, T, D), g_lse is (B, H, T).
    """
    if kernels_run_on(out.device):
        from headwise.attend.attention import triton_carry

        return triton_carry.carry(g_out, out, g_lse, TINY)
    return carried(g_out, out, g_lse)


def carried(g_out: Tensor, out: Tensor, g_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of `carry`, by torch's own operations."""
    wide = at_least_fp32(g_out)
    # Relative to the largest entry: squares of small gradients underflow.
    size = wide.abs().amax(-1, keepdim=True)
    none = size < TINY
    unit = wide / size.masked_fill(none, 1.0)
    first = torch.zeros_like(unit[:1, :1, :1]).index_fill_(-1, torch.zeros(1, dtype=torch.long, device=out.device), 1.0)
    unit, size = torch.where(none, first, unit), size.masked_fill(none, TINY)
    step = g_lse.to(unit.dtype).unsqueeze(-1) / size / unit.square().sum(-1, keepdim=True)
    moved = at_least_fp32(out).addcmul(unit, step, value=-1)
    return torch.where(none, unit * size, wide).to(g_out.dtype), moved.to(out.dtype)


def _again(
    grads: Sequence[Tensor | None], saved: list[Tensor], mask: Tensor | None, causal: bool, scale: float
) -> list[Tensor | None]:
    return gradients(lambda q, k, v: rows_by_matrix(q, k, v, mask, causal, scale)[:2], saved[:3], grads)


_operator = AttentionOperator(
    "attend_with_lse(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale) -> (Tensor, Tensor)",
    _attend,
    _gradients_of,
    _again,
    like=lambda q, k, v, *_: rows_like(q, v, 1),
)
registered_lse, attend_with_lse_backward = _operator.registered, _operator.backward
