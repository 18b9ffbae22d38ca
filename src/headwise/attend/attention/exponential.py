"""Exponentials of values and logarithms of what attention makes of them, each one kernel on CUDA."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from headwise.attend.attention.head_rows import LARGEST
from headwise.numerics.kernels import gradients_again, operator, rows_by_kernel
from headwise.numerics.precision import at_least_fp32


def exponentials(v: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return exp(v - m + high_of(dtype)) and m (B, H, 1, D), the largest value of each channel, in the dtype of v.

    Exponents go from `low_of` to `high_of` the dtype.

    Args:
        v: (B, H, N, D).
        seen: which keys count for m, bool (B|1, H|1, N), or None for all.
    """
    low, high = low_of(v.dtype), high_of(v.dtype)
    with torch.no_grad():
        m = (v if seen is None else v.masked_fill(~seen.unsqueeze(-1), -math.inf)).amax(2, keepdim=True)
    if v.shape[-1] <= LARGEST and rows_by_kernel(v):
        return _Exponential.apply(v, m, low, high), m  # type: ignore[no-untyped-call]  # torch's own is untyped
    return _exponential(v, m, low, high), m


# Of a row with weights A and o = Σ A_j e_j, the gradient of A_j is g·e_j / o, up to g·exp(range of exponents), and that
# of its logit is A_j times this. Over the whole range of the normal numbers, exp(87) in fp32, the first overflows where
# the second is at most g, and a weight that underflows makes nan of it. Over 0.7 of it, exp(61), g may be 1e11, and a
# weight that underflows would have given the logit no more than g·exp(61 - 87).
SPAN = 0.7


def low_of(dtype: torch.dtype) -> float:
    """Return the exponent of the smallest value: in fp16, whose range has none to spare, that of its normal numbers."""
    return math.log(torch.finfo(dtype).tiny) * (1.0 if dtype == torch.float16 else SPAN)


def high_of(dtype: torch.dtype) -> float:
    """Return the exponent of the largest value: above 0 in fp16, so that exponents use both halves of its range."""
    return -math.log(torch.finfo(dtype).tiny) if dtype == torch.float16 else 0.0


def _exponential(v: Tensor, m: Tensor, low: float, high: float) -> Tensor:
    # Keys that no query sees may hold larger values than m; their weight is 0, and must not meet infinity.
    return (at_least_fp32(v) - m + high).clamp(low, high).exp().to(v.dtype)


def logarithms(out: Tensor, m: Tensor) -> Tensor:
    """Return log(out) + m - high_of(dtype) for out (B, H, T, D), and 0 where out is 0, in the dtype of out."""
    high = high_of(out.dtype)
    if out.shape[-1] <= LARGEST and rows_by_kernel(out):
        found: Tensor = _Logarithm.apply(out, m, high)  # type: ignore[no-untyped-call]  # torch's own is untyped
        return found
    return _logarithm(out, m, high)


def _logarithm(out: Tensor, m: Tensor, high: float) -> Tensor:
    wide = at_least_fp32(out)
    none = wide == 0
    return (wide.masked_fill(none, 1.0).log() - high + m).masked_fill(none, 0.0).to(out.dtype)


class _Exponential(torch.autograd.Function):
    """`_exponential` by kernels; m gets no gradient."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, m: Tensor, low: float, high: float) -> Tensor:  # type: ignore[override]  # torch's has no types
        ctx.limits = low, high
        ctx.save_for_backward(v, m)
        found: Tensor = exponential_rows(v, m, low, high)
        return found

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # type: ignore[override]  # torch's has no types
        v, m = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *gradients_again(lambda x: _exponential(x, m, *ctx.limits), (v,), (g,)), None, None, None
        return exponential_rows_backward(g, v, m, *ctx.limits), None, None, None


class _Logarithm(torch.autograd.Function):
    """`_logarithm` by kernels; m gets no gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, m: Tensor, high: float) -> Tensor:  # type: ignore[override]  # torch's has no types
        ctx.high = high
        ctx.save_for_backward(out, m)
        found: Tensor = logarithm_rows(out, m, high)
        return found

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # type: ignore[override]  # torch's has no types
        out, m = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *gradients_again(lambda x: _logarithm(x, m, ctx.high), (out,), (g,)), None, None
        return logarithm_rows_backward(g, out), None, None


def _like_first(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _like_second(_: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


@operator("exponential_rows(Tensor v, Tensor m, float low, float high) -> Tensor", _like_first)
def exponential_rows(v: Tensor, m: Tensor, low: float, high: float) -> Tensor:
    """Return exp(v - m + high), with exponents from `low` to `high`."""
    from headwise.attend.attention import triton_exponential

    e = torch.empty_like(v)
    triton_exponential.exponential(v, m.contiguous(), e, low, high)
    return e


@operator("exponential_rows_backward(Tensor g, Tensor v, Tensor m, float low, float high) -> Tensor", _like_second)
def exponential_rows_backward(g: Tensor, v: Tensor, m: Tensor, low: float, high: float) -> Tensor:
    """Return the gradient of v."""
    from headwise.attend.attention import triton_exponential

    dv = torch.empty_like(v)
    triton_exponential.exponential_backward(g, v, m.contiguous(), dv, low, high)
    return dv


@operator("logarithm_rows(Tensor out, Tensor m, float high) -> Tensor", _like_first)
def logarithm_rows(out: Tensor, m: Tensor, high: float) -> Tensor:
    """Return log(out) + m - high, and 0 where out is 0."""
    from headwise.attend.attention import triton_exponential

    y = torch.empty_like(out)
    triton_exponential.logarithm(out, m.contiguous(), y, high)
    return y


@operator("logarithm_rows_backward(Tensor g, Tensor out) -> Tensor", _like_second)
def logarithm_rows_backward(g: Tensor, out: Tensor) -> Tensor:
    """Return the gradient of out."""
    from headwise.attend.attention import triton_exponential

    do = torch.empty_like(out)
    triton_exponential.logarithm_backward(g, out, do)
    return do
