"""Sigmoid gates of rows, one kernel on CUDA."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from headwise.attend.attention.head_rows import LARGEST
from headwise.numerics.kernels import gradients_again, operator, rows_by_kernel


def gated(x: Tensor, z: Tensor, w: Tensor | None = None, factor: float = 1.0) -> Tensor:
    """Return factor·x·σ(z + w) in the dtype of x.

    Args:
        x: the rows, (B, H, T, D).
        z: of the same shape, or (B, H, T, 1).
        w: as z, or None for 0.
        factor: of all gates.
    """
    if x.shape[-1] <= LARGEST and rows_by_kernel(x, z) and (w is None or (w.shape == z.shape and w.dtype == z.dtype)):
        found: Tensor = _Gated.apply(x, z, w, factor)  # type: ignore[no-untyped-call]  # torch's own is untyped
        return found
    return _gated(x, z, w, factor)


def gated_tokens(x: Tensor, z: Tensor, factor: float = 1.0) -> Tensor:
    """Return factor·x·σ(z) for tokens x and z (B, T, C), in the dtype of x."""
    part = math.gcd(x.shape[-1], 256)
    if part < 16 or not rows_by_kernel(x, z):
        return _gated(x, z, None, factor)
    # Rows as those of heads, which a program holds whole.
    of_x, of_z = (y.unflatten(-1, (-1, part)).transpose(1, 2) for y in (x, z))
    return gated(of_x, of_z, factor=factor).transpose(1, 2).flatten(2)


def _gated(x: Tensor, z: Tensor, w: Tensor | None, factor: float) -> Tensor:
    gate = torch.sigmoid(z if w is None else z + w)
    return x * (gate if factor == 1 else gate * factor).to(x.dtype)


class _Gated(torch.autograd.Function):
    """`_gated` by kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, w: Tensor | None, factor: float) -> Tensor:  # type: ignore[override]  # torch's has no types
        ctx.factor = factor
        ctx.save_for_backward(x, z, w)
        found: Tensor = gate_rows(x, z, w, factor)
        return found

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # type: ignore[override]  # torch's has no types
        x, z, w = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *gradients_again(lambda x, z, w: _gated(x, z, w, ctx.factor), (x, z, w), (g,)), None
        dx, dz = gate_rows_backward(g, x, z, w, ctx.factor)
        return dx, dz, None if w is None else dz, None


def _gate_fake(x: Tensor, z: Tensor, w: Tensor | None, factor: float) -> Tensor:
    return torch.empty_like(x)


@operator("gate_rows(Tensor x, Tensor z, Tensor? w, float factor) -> Tensor", _gate_fake)
def gate_rows(x: Tensor, z: Tensor, w: Tensor | None, factor: float) -> Tensor:
    """Return what `gated` does."""
    from headwise.attend.attention import triton_gates

    y = torch.empty_like(x)
    triton_gates.gate(x, z, w, y, factor)
    return y


def _gate_backward_fake(g: Tensor, x: Tensor, z: Tensor, w: Tensor | None, factor: float) -> list[Tensor]:
    return [torch.empty_like(x), torch.empty_like(z)]


@operator("gate_rows_backward(Tensor g, Tensor x, Tensor z, Tensor? w, float factor) -> Tensor[]", _gate_backward_fake)
def gate_rows_backward(g: Tensor, x: Tensor, z: Tensor, w: Tensor | None, factor: float) -> list[Tensor]:
    """Return the gradients of x and z; w has that of z."""
    from headwise.attend.attention import triton_gates

    made = _gate_backward_fake(g, x, z, w, factor)
    triton_gates.gate_backward(g, x, z, w, made[0], made[1], factor)
    return made
