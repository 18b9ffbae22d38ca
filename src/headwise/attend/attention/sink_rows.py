"""Attention with a sink in each head at the cost of fused attention: a column that takes weight and has no value.

With the logit s of a head's sink, a row of log-sum-exp L has the total T = log(exp L + exp s). Its weights are
P = exp(logits - T), and its output is exp(L - T) times that of fused attention. The gradient of its logits is
P (dO V^T - <dO, O>), which is what any backward of attention computes from this output O and T instead of its own. The
sink's own logit gets -exp(s - T) <dO, O>.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.attend.attention.flash_rows import by_flash, flash_gradients, flash_takes
from headwise.attend.attention.row_statistics import attend_whole, gradients_of
from headwise.attend.attention.second_derivatives import gradients, rows_by_matrix
from headwise.numerics.kernels import as_hosts, kernels_run_on
from headwise.numerics.operators import AttentionOperator, rows_like, without_autocast
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
    found: Tensor = _operator(q, k, v, sinks, mask, causal, scale)[0]
    return found


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


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    q, k, v, sinks, *call = inputs
    return (q, k, v, *output, sinks), (*call, ctx.needs_input_grad[3])


def _gradients_of(
    grads: Sequence[Tensor | None], saved: list[Tensor], mask: Tensor | None, causal: bool, scale: float, learned: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and the sinks, an empty one unless `learned`."""
    (g_out, _), (q, k, v, out, total, sinks) = grads, saved
    assert g_out is not None
    if not learned:
        of_sinks = sinks.new_empty(0)
    elif kernels_run_on(q.device):
        from headwise.attend.attention import triton_sinks

        of_sinks = triton_sinks.slopes(g_out, out, total, sinks)
    else:
        with without_autocast(q.device):
            of_sinks = slopes(g_out, out, total, sinks)
    if flash_takes(q, k, v, mask, causal, fp16=True):
        return *flash_gradients(g_out, q, k, v, out, total, causal, scale), of_sinks
    # Entropies and squares are read with their gradients only.
    given = [q, k, v, out, total, total, total]
    return *gradients_of((g_out, None, None, None), given, mask, causal, scale), of_sinks


def _again(
    grads: Sequence[Tensor | None], saved: list[Tensor], mask: Tensor | None, causal: bool, scale: float, learned: bool
) -> list[Tensor | None]:
    def form(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> list[Tensor]:
        out, lse, *_ = rows_by_matrix(q, k, v, mask, causal, scale)
        return [lowered(out, lse, sinks)[0]]

    return gradients(form, [*saved[:3], saved[5]], grads[:1])


_operator = AttentionOperator(
    "attend_with_sinks(Tensor q, Tensor k, Tensor v, Tensor sinks, Tensor? mask, bool causal, float scale)"
    " -> (Tensor, Tensor)",
    _attend,
    _gradients_of,
    _again,
    like=lambda q, k, v, *_: rows_like(q, v, 1),
    settings="Tensor? mask, bool causal, float scale, bool learned",
    learned=4,
    keep=_keep,
    slopes_like=lambda saved, *call: (
        *(as_hosts(x, x.shape[1], x.shape[2]) for x in saved[:3]),
        saved[5].new_empty(saved[5].shape if call[-1] else 0),
    ),
    frozen=1,
)
registered_sinks, attend_with_sinks_backward = _operator.registered, _operator.backward
