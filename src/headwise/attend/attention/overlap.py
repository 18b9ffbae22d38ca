"""The overlap of heads in columns, the sum over pairs of heads of ||A_i^T A_j||^2, by kernels that hold no matrix.

The kernels compute the gradients with the value, because both need the same Gram matrices, which would be recomputed
in backward; a backward multiplies them by the gradient of each sample's value. The PyTorch form is the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.attend.attention.second_derivatives import overlap_by_matrix
from headwise.borders import in_transform
from headwise.numerics import kernels
from headwise.numerics.kernels import plain
from headwise.numerics.operators import calls_are_seen


def overlap_runs(q: Tensor, k: Tensor) -> bool:
    """Return whether the kernels compute the overlap of these queries and keys; elsewhere the matrix is computed."""
    # ONNX and other runtimes do not have our operator.
    return (
        kernels.operators_run_on(q.device) and not in_transform() and not torch.compiler.is_exporting() and plain(q, k)
    )


def head_overlap(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    real: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor:
    """Return the sum over pairs of heads of ||A_i^T A_j||^2 of each sample, (B,) in fp32, where `overlap_runs`.

    Args:
        q, k: (B, H, T, D), (B, Hkv, N, D).
        lse: the log-sum-exp of the rows of logits, (B, H, T), without a sink; it needs no gradient of its own.
        mask: broadcastable to (B, H, T, N), bool (True: allowed) or added to the logits; it gets no gradient.
        real: which queries count, bool (B|1, T), or None for all.
        sinks: the logits of sinks, (H,), or None.
        causal: whether query i sees keys 0..i only, in addition to the mask.
        scale: factor of the logits.
    """
    slopes = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, sinks))
    given = (q, k, lse.detach().contiguous(), mask, real, sinks, causal, scale, slopes)
    kernels.note("head_overlap", q)
    overlap = _operator if calls_are_seen(q, k, k) else _Overlap.apply
    return overlap(*given)[0]  # type: ignore[no-any-return, no-untyped-call]


def _forward(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    real: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    scale: float,
    slopes: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from headwise.attend.attention import triton_overlap

    delta, dq, dk = triton_overlap.head_overlap(q, k, lse, mask, real, sinks, causal, scale, slopes)
    return delta.sum((1, 2)) / 4, delta, dq, dk


_operator = torch.library.custom_op("headwise::head_overlap", _forward, mutates_args=())


@_operator.register_fake
def _(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    real: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    scale: float,
    slopes: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk = (x.new_empty(x.shape if slopes else (0,)) for x in (q, k))
    return q.new_empty(q.shape[:1], dtype=torch.float32), torch.empty_like(lse, dtype=torch.float32), dq, dk


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, lse, mask, real, sinks, ctx.causal, ctx.scale, _ = inputs
    _, delta, dq, dk = output
    ctx.save_for_backward(q, k, lse, mask, real, sinks, delta if sinks is not None else None, dq, dk)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, g: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 9
    q, k, lse, mask, real, sinks, delta, dq, dk = ctx.saved_tensors
    if torch.is_grad_enabled():
        # create_graph=True
        of_inputs = _again(ctx, (q, k, sinks), mask, real, g)
        return (*of_inputs[:2], None, None, None, of_inputs[2], None, None, None)
    each = g[:, None, None, None]
    # Rounded once: a product of two dtypes has the wider one.
    of_q, of_k = (torch.mul(x, each, out=torch.empty_like(x)) for x in (dq, dk))
    of_sinks = None
    if sinks is not None:
        share = torch.sigmoid(sinks.to(lse.dtype)[None, :, None] - lse)
        # A row that does not count has 0 there.
        of_sinks = -(share * delta * g[:, None, None]).sum((0, 2)).to(sinks.dtype)
    return of_q, of_k, None, None, None, of_sinks, None, None, None


def _again(
    ctx: Any, inputs: Sequence[Tensor | None], mask: Tensor | None, real: Tensor | None, g: Tensor
) -> list[Tensor | None]:
    def form(q: Tensor, k: Tensor, sinks: Tensor | None) -> Tensor:
        return overlap_by_matrix(q, k, mask, real, sinks, ctx.causal, ctx.scale)

    # Views, as the host may give one tensor as queries and keys.
    views = [x if x is None else x.view_as(x) for x in inputs]
    with torch.autocast(g.device.type, enabled=False):
        return kernels.gradients_again(form, views, [g])


_operator.register_autograd(_gradients, setup_context=_save)


class _Overlap(torch.autograd.Function):
    """`head_overlap` where operators are not seen."""

    forward = staticmethod(_forward)
    setup_context = staticmethod(_save)
    backward = staticmethod(_gradients)
