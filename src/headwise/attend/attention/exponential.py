"""Exponentials of values and logarithms of what attention makes of them, each one kernel on CUDA."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwise.attend.attention.head_rows import LARGEST
from headwise.numerics.kernels import by_kernel, rows_by_kernel
from headwise.numerics.precision import at_least_fp32

KERNELS = "headwise.attend.attention.triton_exponential"


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
        return _exponential_by_kernel(v, m, low, high), m
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
        found: Tensor = _logarithm_by_kernel(out, m, high)
        return found
    return _logarithm(out, m, high)


def _logarithm(out: Tensor, m: Tensor, high: float) -> Tensor:
    wide = at_least_fp32(out)
    none = wide == 0
    return (wide.masked_fill(none, 1.0).log() - high + m).masked_fill(none, 0.0).to(out.dtype)


# m gets no gradient.
_exponential_by_kernel = by_kernel(
    "exponential_rows(Tensor v, Tensor m, float low, float high) -> Tensor", _exponential, KERNELS, learned=1
)
_logarithm_by_kernel = by_kernel(
    "logarithm_rows(Tensor out, Tensor m, float high) -> Tensor", _logarithm, KERNELS, learned=1
)
