"""Attention with a sink in each head at the cost of fused attention: a column that takes weight and has no value.

With the logit s of a head's sink, a row of log-sum-exp L has the total T = log(exp L + exp s). Its weights are
P = exp(logits - T), and its output is exp(L - T) times that of fused attention. The gradient of its logits is
P (dO V^T - <dO, O>), which is what any backward of attention computes from this output O and T instead of its own. The
sink's own logit gets -exp(s - T) <dO, O>.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.attend.attention.flash_rows import by_flash, flash_gradients, flash_takes
from headwise.attend.attention.row_statistics import attend_whole, gradients_of
from headwise.attend.attention.second_derivatives import gradients, rows_by_matrix
from headwise.numerics.kernels import as_hosts, kernels_run_on, rows_first
from headwise.numerics.operators import calls_are_seen, without_autocast
from headwise.numerics.precision import at_least_fp32


def attend_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """Return A v, where each row of A leaves a sink its share of the weight, (B, H, T, Dv).

    By torch's flash kernels where they take the call, else by those of `attend_rows`. A row without allowed keys is 0.

    Args:
        q, k, v, mask, causal, scale: as in `attend_rows`.
        sinks: the logit of each head's sink, (H,).
    """
    if calls_are_seen(q, k, v, sinks):
        found: Tensor = registered_sinks(q, k, v, sinks, mask, causal, scale)[0]
        return found
    if not torch.is_grad_enabled():
        return _attend(q, k, v, sinks, mask, causal, scale)[0]
    out: Tensor = _WithSinks.apply(q, k, v, sinks, mask, causal, scale)[0]
    return out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    if flash_takes(q, k, v, mask, causal, fp16=True):
        out, lse = by_flash(q, k, v, causal, scale)
    else:
        out, lse, *_ = attend_whole(q, k, v, mask, causal, scale)
    if kernels_run_on(q.device):
        from headwise.attend.attention import triton_sinks

        return triton_sinks.lowered(out, lse, sinks)
    with without_autocast(q.device):
        return lowered(out, lse, sinks)


def lowered(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp(L - T) · out and the total T, from out (B, H, T, D) and the log-sum-exp L (B, H, T)."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return (at_least_fp32(out) * (lse - total).exp().unsqueeze(-1)).to(out.dtype), total


def slopes(g_out: Tensor, out: Tensor, total: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks' logits, (H,)."""
    product = (at_least_fp32(g_out) * at_least_fp32(out)).sum(-1)
    return -((sinks.to(total.dtype)[:, None] - total).exp() * product).sum((0, 2)).to(sinks.dtype)


@torch.library.custom_op("headwise::attend_with_sinks", mutates_args=())
def registered_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the result of `attend_with_sinks` and the totals, as the operator that compilers and counters see."""
    out, total = _attend(q, k, v, sinks, mask, causal, scale)
    return rows_first(out), total


@registered_sinks.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    total = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return as_hosts(v, q.shape[1], q.shape[2]), total


@torch.library.custom_op("headwise::attend_with_sinks_backward", mutates_args=())
def attend_with_sinks_backward(
    g_out: Tensor, saved: list[Tensor], mask: Tensor | None, causal: bool, scale: float, learned: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and the sinks, an empty one unless `learned`.

    `saved` is q, k, v, the forward's two results and the sinks.
    """
    dq, dk, dv, of_sinks = _gradients_of(g_out, saved, mask, causal, scale, learned)
    empty = saved[5].new_empty(0)
    return rows_first(dq), rows_first(dk), rows_first(dv), empty if of_sinks is None else of_sinks


@attend_with_sinks_backward.register_fake
def _(
    g_out: Tensor, saved: list[Tensor], mask: Tensor | None, causal: bool, scale: float, learned: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (as_hosts(x, x.shape[1], x.shape[2]) for x in saved[:3])
    return q, k, v, saved[5].new_empty(saved[5].shape if learned else 0)


def _gradients_of(
    g_out: Tensor, saved: list[Tensor], mask: Tensor | None, causal: bool, scale: float, learned: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    q, k, v, out, total, sinks = saved
    of_sinks = None
    if learned and kernels_run_on(q.device):
        from headwise.attend.attention import triton_sinks

        of_sinks = triton_sinks.slopes(g_out, out, total, sinks)
    elif learned:
        with without_autocast(q.device):
            of_sinks = slopes(g_out, out, total, sinks)
    if flash_takes(q, k, v, mask, causal, fp16=True):
        return *flash_gradients(g_out, q, k, v, out, total, causal, scale), of_sinks
    # Entropies and squares are read with their gradients only.
    given = [q, k, v, out, total, total, total]
    return *gradients_of((g_out, None, None, None), given, mask, causal, scale), of_sinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, ctx.mask, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, sinks)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, g_out: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if g_out is None:
        return (None,) * 7
    saved, call, learned = list(ctx.saved_tensors), (ctx.mask, ctx.causal, ctx.scale), ctx.needs_input_grad[3]
    if torch.is_grad_enabled():
        # create_graph=True
        def form(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> list[Tensor]:
            out, lse, *_ = rows_by_matrix(q, k, v, *call)
            return [lowered(out, lse, sinks)[0]]

        return (*gradients(form, [*saved[:3], saved[5]], (g_out,)), None, None, None)
    if calls_are_seen(*saved[:3], saved[5]):
        *found, of_sinks = attend_with_sinks_backward(g_out, saved, *call, learned)
        return (*found, of_sinks if learned else None, None, None, None)
    return (*_gradients_of(g_out, saved, *call, learned), None, None, None)


registered_sinks.register_autograd(_gradients, setup_context=_save)


class _WithSinks(torch.autograd.Function):
    """`attend_with_sinks` where operators are not seen."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _attend(*inputs)
        ctx.mark_non_differentiable(output[1])
        _save(ctx, inputs, output)
        return output

    backward = staticmethod(_gradients)
