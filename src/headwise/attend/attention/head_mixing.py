"""Attention with weights that are mixed over heads and normalised, by kernels that store strips of them in memory of a
fixed size; the PyTorch form is the matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.attend.attention.edited_logits import Once, edits_run
from headwise.attend.attention.flash_rows import attend_with_lse
from headwise.attend.attention.matrix_free import FusedMap
from headwise.attend.core import Attend, Call
from headwise.numerics.kernels import as_hosts
from headwise.numerics.masked import visible
from headwise.numerics.operators import calls_are_seen

# A program holds the entries of all heads.
MOST_HEADS = 64


def mixes(attend: Attend, call: Call) -> bool:
    """Return whether the kernels mix the weights of this map over heads; elsewhere the matrix is computed."""
    if not isinstance(attend, FusedMap) or attend.dropout > 0 or call.heads > MOST_HEADS:
        return False
    learned = attend.mask is not None and attend.mask.requires_grad
    return not learned and edits_run(attend.q, attend.k, call.v)


def mixed_map(
    attend: Attend, v: Tensor, call: Call, mix: Tensor, norm: tuple[Tensor, Tensor] | None, eps: float,
    fixed: Tensor | None, number: float | None, count: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (sum over g of mix[h, g] A_g, normalised) v, (B, H, T, Dv), and what the norm's `table` has.

    That are the mean and variance of each head's entries, its factors and the variance of a sample, (5, H) in fp32.

    Args:
        attend: the map A, for which `mixes` is True.
        v: the values, (B, H, N, Dv).
        call: the call.
        mix: (H, H).
        norm: gain and shift of the norm, (H,); None for no norm.
        eps: what the norm adds to variances.
        fixed: mean and variance (2, H) where they are not those of the batch.
        number, count: for those of the batch, of how many entries they are, on the host or on the device (0-d): those
            of real queries and the keys that they see.
    """
    assert isinstance(attend, FusedMap)
    attend.mixed = True
    q, k, mask, causal, scale = attend.q, attend.k, attend.mask, attend.causal, attend.scale
    with torch.no_grad():
        _, lse = attend_with_lse(q.detach(), k.detach(), v.detach(), mask, causal, scale)
    gain, shift = norm or (None, None)
    seen, real = None, None
    if mask is not None and norm is not None:
        four = mask[(None,) * (4 - mask.dim())]
        seen = four if four.shape[1] == 1 else visible(four).any(1, keepdim=True)
        real = call.real_queries() if fixed is None else None
    given = (q, k, v, lse, mask, seen, real, attend.sinks, causal, scale, mix, gain, shift, fixed, number, count, eps)
    out, _, _, table = (_operator if calls_are_seen(q, k, v) else _MixedHeads.apply)(*given)  # type: ignore[no-untyped-call]
    return out, table


def _forward(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, mask: Tensor | None, seen: Tensor | None, real: Tensor | None,
    sinks: Tensor | None, causal: bool, scale: float, mix: Tensor, gain: Tensor | None, shift: Tensor | None,
    fixed: Tensor | None, number: float | None, count: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from headwise.attend.attention import triton_mixing

    x, total, figures = triton_mixing.forward(
        q, k, v, lse, mask, seen, sinks, causal, scale, mix.contiguous(), gain is not None
    )
    if gain is None or shift is None:
        return x, x.new_empty(0), total, figures.new_empty(0)
    totals = fixed if fixed is not None else (figures if real is None else figures * real[:, None]).sum((1, 3))
    table = triton_mixing.norm(totals, number, count, gain, shift, eps)
    return triton_mixing.combine(x, total, table), x, total, table


_operator = torch.library.custom_op("headwise::mix_heads", _forward, mutates_args=())


@_operator.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, mask: Tensor | None, seen: Tensor | None, real: Tensor | None,
    sinks: Tensor | None, causal: bool, scale: float, mix: Tensor, gain: Tensor | None, shift: Tensor | None,
    fixed: Tensor | None, number: float | None, count: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    out = as_hosts(v, q.shape[1], q.shape[2])
    if gain is None:
        return out, out.new_empty(0), out.new_empty(0), out.new_empty(0, dtype=torch.float32)
    wide = torch.float32 if v.dtype == torch.float16 else v.dtype
    total = torch.empty_like(out, dtype=wide)
    if not causal and seen is None:
        total = v.new_empty(v.shape[0], q.shape[1], 1, v.shape[3], dtype=wide).expand(out.shape)
    return out, torch.empty_like(out), total, q.new_empty(5, q.shape[1], dtype=torch.float32)


def _backward(
    g: Tensor, saved: list[Tensor], mask: Tensor | None, seen: Tensor | None, real: Tensor | None,
    sinks: Tensor | None, normed: bool, number: float | None, count: Tensor | None, causal: bool, scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v and mix, of gain and shift (2, H), and of sinks; the last two may be empty.

    `saved` is q, k, v, the log-sum-exps, mix, and with a norm what the forward returned besides the output.
    """
    from headwise.attend.attention import triton_mixing

    q, k, v, lse, mix, *of_forward = saved
    g = g if g.stride(-1) == 1 else g.contiguous()
    numbers, of_norm = None, lse.new_empty(0)
    if normed:
        x, total, table = of_forward
        numbers, of_norm = triton_mixing.norm_backward(triton_mixing.dots(g, x, total), table, number, count, eps)
    dq, dk, dv, dmix, delta = triton_mixing.backward(
        g, q, k, v, lse, mask, seen, real, sinks, causal, scale, mix.contiguous(), numbers
    )
    of_sinks = lse.new_empty(0)
    if sinks is not None:
        share = torch.sigmoid(sinks.to(lse.dtype)[None, :, None] - lse)
        of_sinks = -(share * delta).sum((0, 2)).to(sinks.dtype)
    return dq, dk, dv, dmix.to(mix.dtype), of_norm, of_sinks


_operator_of_backward = torch.library.custom_op("headwise::mix_heads_backward", _backward, mutates_args=())


@_operator_of_backward.register_fake
def _(
    g: Tensor, saved: list[Tensor], mask: Tensor | None, seen: Tensor | None, real: Tensor | None,
    sinks: Tensor | None, normed: bool, number: float | None, count: Tensor | None, causal: bool, scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, lse, mix, *_ = saved
    dq, dk, dv = (as_hosts(x, x.shape[1], x.shape[2]) for x in (q, k, v))
    of_norm = lse.new_empty((2, q.shape[1]) if normed else (0,))
    return dq, dk, dv, torch.empty_like(mix), of_norm, lse.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, lse, ctx.mask, ctx.seen, ctx.real, ctx.sinks, ctx.causal, ctx.scale, mix, gain, *_ = inputs
    *_, ctx.number, ctx.count, ctx.eps = inputs
    ctx.kind = None if gain is None else gain.dtype
    ctx.save_for_backward(q, k, v, lse, mix, *(() if gain is None else output[1:]))
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, g: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 17
    saved = list(ctx.saved_tensors)
    run = _operator_of_backward if calls_are_seen(*saved[:3]) else _backward
    dq, dk, dv, dmix, of_norm, of_sinks = run(
        g, saved, ctx.mask, ctx.seen, ctx.real, ctx.sinks, ctx.kind is not None, ctx.number, ctx.count, ctx.causal,
        ctx.scale, ctx.eps,
    )  # fmt: skip
    dgain, dshift = (None, None) if ctx.kind is None else of_norm.to(ctx.kind)
    dsinks = None if ctx.sinks is None else of_sinks
    return dq, dk, dv, None, None, None, None, dsinks, None, None, dmix, dgain, dshift, None, None, None, None


_operator.register_autograd(_gradients, setup_context=_save)


class _MixedHeads(torch.autograd.Function):
    """The operator where operators are not seen."""

    forward = staticmethod(_forward)
    setup_context = staticmethod(_save)

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs, which cannot be differentiated again."""
        again = torch.is_grad_enabled()
        with torch.no_grad():
            gradients = _gradients(ctx, *of_outputs)
        if not again or gradients[0] is None:
            return gradients
        return (*Once.apply(ctx.saved_tensors[0], *gradients[:3]), *gradients[3:])  # type: ignore[no-untyped-call]
