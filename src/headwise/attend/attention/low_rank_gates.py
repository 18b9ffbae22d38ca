"""Sigmoid gates whose logits are low-rank functions, one kernel on CUDA that never writes the logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headwise.attend.attention.gates import gated, gated_tokens
from headwise.numerics.kernels import as_hosts, gradients_again, operator, rows_by_kernel

# Largest head size and rank of the kernel.
LARGEST, RANK = 128, 32


def low_rank_gated(
    x: Tensor, inner: Sequence[Tensor], up: Sequence[Tensor], bias: Tensor | None = None, factor: float = 1.0
) -> Tensor:
    """Return factor·x·σ(Σ silu(inner)·up + bias) in the dtype of x.

    Args:
        x: the rows, (B, H, T, D).
        inner: of one source or two, (B, H, T, r).
        up: of each source, (H, r, D).
        bias: (H, D), or None for 0.
        factor: of all gates.
    """
    if _by_kernel(x, inner, up, bias):
        found: Tensor = _LowRank.apply(factor, len(inner), x, *inner, *up, bias)  # type: ignore[no-untyped-call]  # torch's own is untyped
        return found
    return _form(factor, len(inner), x, *inner, *up, bias)


def low_rank_gated_tokens(x: Tensor, inner: Tensor, up: Tensor, bias: Tensor | None, factor: float) -> Tensor:
    """Return factor·x·σ(silu(inner)·upᵀ + bias) for tokens x (B, T, C), inner (B, T, r), up (C, r) and bias (C,)."""
    part = math.gcd(x.shape[-1], LARGEST)
    if part < 16 or not _by_kernel(x[..., :part], (inner,), (up,), bias):
        return gated_tokens(x, F.linear(F.silu(inner), up, bias), factor)
    # Channels in parts, which are as heads to the kernel.
    of_x = x.unflatten(-1, (-1, part)).transpose(1, 2)
    of_bias = None if bias is None else bias.unflatten(0, (-1, part))
    spread = inner.unsqueeze(1).expand(-1, of_x.shape[1], -1, -1)
    found = low_rank_gated(of_x, (spread,), (up.unflatten(0, (-1, part)).mT,), of_bias, factor)
    return found.transpose(1, 2).flatten(2)


def with_inner(x: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Return x and the inner rows that its gates have of it, x·downᵀ.

    Args:
        x: rows (B, H, T, D), or tokens (B, T, C).
        down: (H, r, D), or (r, C).

    Returns:
        x itself, to be gated, so that one product adds both of its gradients; and (B, H, T, r) or (B, T, r).
    """
    if x.dtype == down.dtype and rows_by_kernel(x, down) and not torch.is_autocast_enabled(x.device.type):
        found: tuple[Tensor, Tensor] = _WithInner.apply(x, down)  # type: ignore[no-untyped-call]  # torch's own
        return found
    return x, F.linear(x, down) if x.dim() == 3 else x @ down.mT


class _WithInner(torch.autograd.Function):
    """`with_inner`; its backward is of operators that can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # torch's has no types
        ctx.save_for_backward(x, down)
        return x.view_as(x), F.linear(x, down) if x.dim() == 3 else x @ down.mT

    @staticmethod
    def backward(ctx: Any, g: Tensor, of_inner: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # torch's has no types
        x, down = ctx.saved_tensors
        if x.dim() == 3:
            rows, inner = x.flatten(0, 1), of_inner.reshape(-1, of_inner.shape[-1])
            return torch.addmm(g.reshape(rows.shape), inner, down).view(x.shape), inner.mT @ rows
        rows, inner, above = (y.reshape(-1, *y.shape[2:]) for y in (x, of_inner, g))
        each = down.expand(x.shape[0], -1, -1, -1).reshape(-1, *down.shape[1:])
        of_down = torch.bmm(inner.mT, rows).view(-1, *down.shape).sum(0)
        return torch.baddbmm(above, inner, each).view(x.shape), of_down


def _by_kernel(x: Tensor, inner: Sequence[Tensor], up: Sequence[Tensor], bias: Tensor | None) -> bool:
    """Return whether the kernel computes on these tensors now."""
    dtypes = {y.dtype for y in (x, *inner, *up, *([] if bias is None else [bias]))}
    ranks = {y.shape[-1] for y in inner}
    small = x.shape[-1] <= LARGEST and len(ranks) == 1 and max(ranks) <= RANK
    return small and len(dtypes) == 1 and rows_by_kernel(x, *inner, *up)


def _form(factor: float, sources: int, x: Tensor, *given: Tensor | None) -> Tensor:
    *tensors, bias = given
    z = [F.silu(inner) @ up for inner, up in zip(tensors[:sources], tensors[sources:], strict=True)]  # type: ignore[arg-type, operator]  # bias alone may be None
    if bias is not None:
        z[0] = z[0] + bias.unsqueeze(1)
    return gated(x, z[0], z[1] if sources > 1 else None, factor)


class _LowRank(torch.autograd.Function):
    """`_form` by kernels."""

    @staticmethod
    def forward(ctx: Any, factor: float, sources: int, *given: Tensor | None) -> Tensor:  # type: ignore[override]  # torch's has no types
        ctx.settings = factor, sources
        ctx.save_for_backward(*given)
        x, *tensors, bias = given
        found: Tensor = low_rank_gate(x, tensors[:sources], tensors[sources:], bias, factor)
        return found

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # type: ignore[override]  # torch's has no types
        (factor, sources), given = ctx.settings, ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, None, *gradients_again(lambda *y: _form(factor, sources, *y), given, (g,))
        x, *tensors, bias = given
        made = low_rank_gate_backward(g, x, tensors[:sources], tensors[sources:], bias, factor)
        return None, None, *made, *([None] if bias is None else [])


def _gate_fake(x: Tensor, inner: list[Tensor], up: list[Tensor], bias: Tensor | None, factor: float) -> Tensor:
    return torch.empty_like(x)


@operator("low_rank_gate(Tensor x, Tensor[] inner, Tensor[] up, Tensor? bias, float factor) -> Tensor", _gate_fake)
def low_rank_gate(x: Tensor, inner: list[Tensor], up: list[Tensor], bias: Tensor | None, factor: float) -> Tensor:
    """Return what `low_rank_gated` does."""
    from headwise.attend.attention import triton_low_rank_gates

    y = torch.empty_like(x)
    triton_low_rank_gates.gate(x, inner, up, bias, y, factor)
    return y


def _backward_fake(
    g: Tensor, x: Tensor, inner: list[Tensor], up: list[Tensor], bias: Tensor | None, factor: float
) -> list[Tensor]:
    return [
        torch.empty_like(x),
        *(as_hosts(y, y.shape[1], y.shape[2]) for y in inner),
        *(y.new_empty(y.shape) for y in up),
        *([] if bias is None else [bias.new_empty(bias.shape)]),
    ]


@operator(
    "low_rank_gate_backward(Tensor g, Tensor x, Tensor[] inner, Tensor[] up, Tensor? bias, float factor) -> Tensor[]",
    _backward_fake,
)
def low_rank_gate_backward(
    g: Tensor, x: Tensor, inner: list[Tensor], up: list[Tensor], bias: Tensor | None, factor: float
) -> list[Tensor]:
    """Return the gradients of x, of each inner, of each up, and of the bias if there is one."""
    from headwise.attend.attention import triton_low_rank_gates

    made = _backward_fake(g, x, inner, up, bias, factor)
    triton_low_rank_gates.gate_backward(g, x, inner, up, bias, made, factor)
    return made
