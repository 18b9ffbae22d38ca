"""Pairs of heads and agreement between heads, in one pass each way on CUDA by the kernels of `triton_pairs`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headwise.attend.attention.head_rows import LARGEST
from headwise.numerics.kernels import by_kernel, gradients_again, operator, rows_by_kernel
from headwise.numerics.precision import at_least_fp32

# Lower bound of a norm, as in `F.normalize`.
TINY = 1e-12
KERNELS = "headwise.attend.attention.triton_pairs"


def difference(own: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """Return, for heads 2j and 2j + 1, own of the first - factor·other of the second, then the same with both swapped.

    Args:
        own, other: (B, H, T, D).
        factor: 0-d, or one per pair and query, (B, H/2, T, 1).
    """
    if rows_by_kernel(own, other, factor) and own.dtype == other.dtype and own.shape[-1] <= LARGEST:
        found: Tensor = _difference_by_kernel(own, other, factor)
        return found
    return _difference(own, other, factor)


def _difference(own: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    own, other, factor = own.unflatten(1, (-1, 2)), other.unflatten(1, (-1, 2)), factor.to(own.dtype)
    on_first = own[:, :, 0] - factor * other[:, :, 1]
    on_second = other[:, :, 0] - factor * own[:, :, 1]
    return torch.stack([on_first, on_second], dim=2).flatten(1, 2)


_difference_by_kernel = by_kernel(
    "pair_difference(Tensor own, Tensor other, Tensor factor) -> Tensor",
    _difference,
    KERNELS,
    slopes=lambda own, other, factor: [torch.empty_like(own), torch.empty_like(other), factor.new_empty(factor.shape)],
)


def pair_norm(x: Tensor, gain: Tensor, scale: float, eps: float) -> Tensor:
    """Return the rows of heads 2j and 2j + 1 over their common root mean square, times gains per channel and a scale.

    Args:
        x: (B, H, T, D).
        gain: (2·D,), of the channels of the first head of each pair, then of the second's.
        scale: a factor of all.
        eps: added to the mean square.
    """
    if rows_by_kernel(x, gain) and x.shape[-1] <= LARGEST:
        found: Tensor = _pair_norm_by_kernel(x, gain, scale, eps)
        return found
    return _pair_norm(x, gain, scale, eps)


def _pair_norm(x: Tensor, gain: Tensor, scale: float, eps: float) -> Tensor:
    # The norm runs over both heads of a pair: (B, H/2, T, 2, D).
    pairs = at_least_fp32(x).unflatten(1, (-1, 2)).transpose(2, 3)
    pairs = pairs * torch.rsqrt(pairs.square().mean((-2, -1), keepdim=True) + eps)
    pairs = pairs * at_least_fp32(gain).view(2, -1) * scale
    return pairs.transpose(2, 3).flatten(1, 2).to(x.dtype)


_pair_norm_by_kernel = by_kernel(
    "pair_norm_rows(Tensor x, Tensor gain, float scale, float eps) -> Tensor", _pair_norm, KERNELS
)


def agreement(x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x (B, H, T, D), and the mean cosine of all pairs of its heads in each token, (B, T) in fp32 or wider.

    The returned x is to be used instead of the given one: its gradient and that of the agreement take one pass. Tokens
    that are not `real`, (B|1, T|1), may hold any number; what is returned for them is to be ignored.
    """
    if rows_by_kernel(x) and x.shape[-1] <= LARGEST:
        found: tuple[Tensor, Tensor] = _Agreement.apply(x)  # type: ignore[no-untyped-call]  # torch's own
        return found
    return x, agreement_of(x if real is None else x.masked_fill(~real[:, None, :, None], 0.0))


def agreement_of(x: Tensor) -> Tensor:
    """Return the mean cosine of all pairs of heads of x (B, H, ..., D), (B, ...), by operators of PyTorch."""
    # Σ_ij cos(x_i, x_j) = ‖Σ_h x̂_h‖²; zero vectors add nothing.
    return F.normalize(at_least_fp32(x), dim=-1, eps=TINY).mean(1).square().sum(-1)


class _Agreement(torch.autograd.Function):
    """`agreement` by kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # torch's has no types
        ctx.save_for_backward(x)
        return x.view_as(x), head_agreement(x)

    @staticmethod
    def backward(ctx: Any, up: Tensor, g: Tensor) -> Tensor:  # type: ignore[override]  # torch's has no types
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            (own,) = gradients_again(agreement_of, (x,), (g,))
            return up if own is None else up + own
        found: Tensor = head_agreement_backward(g, up, x)
        return found


def _agreement_fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[2], dtype=torch.float32)


@operator("head_agreement(Tensor x) -> Tensor", _agreement_fake)
def head_agreement(x: Tensor) -> Tensor:
    """Return what `agreement_of` does."""
    from headwise.attend.attention import triton_pairs

    y = _agreement_fake(x)
    triton_pairs.agreement(x, y, TINY)
    return y


@operator("head_agreement_backward(Tensor g, Tensor up, Tensor x) -> Tensor", lambda g, up, x: torch.empty_like(x))
def head_agreement_backward(g: Tensor, up: Tensor, x: Tensor) -> Tensor:
    """Return `up` and the gradient of x by its agreement."""
    from headwise.attend.attention import triton_pairs

    dx = torch.empty_like(x)
    triton_pairs.agreement_backward(g, up, x, dx, TINY)
    return dx
