"""Computations on the rows of each head, (B, H, T, D): norms, projections and mixtures, each one kernel on CUDA.

Each is a function of PyTorch operators, which a CPU and compiled graphs run, and one by the kernels of
`triton_head_rows`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headwise.numerics.kernels import by_kernel, gradients_again, operator, rows_by_kernel
from headwise.numerics.precision import at_least_fp32

# Largest head size of the kernels.
LARGEST = 1024
RMS, LAYER, DIVIDE = 0, 1, 2
KERNELS = "headwise.attend.attention.triton_head_rows"


def normalised(q: Tensor, k: Tensor, gain_q: Tensor, gain_k: Tensor, eps: float, layer: bool) -> tuple[Tensor, Tensor]:
    """Return q (B, H, T, D) and k (B, H, N, D) at unit root mean square, or by a layer norm, times gains per head.

    Args:
        q, k: the rows.
        gain_q, gain_k: one gain for each head, or for as many consecutive heads as there are heads to a gain.
        eps: added to the mean square.
        layer: subtract each row's mean first.
    """
    if q.shape[-1] <= LARGEST and rows_by_kernel(q, k, gain_q, gain_k):
        kind = LAYER if layer else RMS
        found: tuple[Tensor, Tensor] = _Norm.apply(eps, kind, q, k, gain_q, gain_k)  # type: ignore[no-untyped-call]  # torch's own
        return found
    return _normalised(q, gain_q, eps, layer), _normalised(k, gain_k, eps, layer)


def _normalised(x: Tensor, gain: Tensor, eps: float, layer: bool) -> Tensor:
    norm = F.layer_norm if layer else F.rms_norm
    return norm(x, x.shape[-1:], eps=eps) * _by_head(gain, x).to(x.dtype)


def normalised_rows(x: Tensor) -> Tensor:
    """Return the rows of x (B, H, T, D) at length 1; zeros stay zeros."""
    if x.shape[-1] <= LARGEST and rows_by_kernel(x):
        # The root mean square times √D is the length.
        gain = x.new_full((1,), x.shape[-1] ** -0.5, dtype=torch.float32)
        found: tuple[Tensor] = _Norm.apply(1e-27, RMS, x, gain)  # type: ignore[no-untyped-call]  # torch's own
        return found[0]
    return F.normalize(at_least_fp32(x), dim=-1).to(x.dtype)


def normalised_values(v: Tensor, eps: float) -> Tensor:
    """Return the rows of v (B, H, N, D) at unit root mean square; `eps` is added to the mean square."""
    if v.shape[-1] <= LARGEST and rows_by_kernel(v):
        gain = v.new_ones((1,), dtype=torch.float32)
        found: tuple[Tensor] = _Norm.apply(eps, RMS, v, gain)  # type: ignore[no-untyped-call]  # torch's own
        return found[0]
    return F.rms_norm(v, v.shape[-1:], eps=eps)


def divided(x: Tensor, by: Tensor) -> Tensor:
    """Return x (B, H, T, D) over a number per head, or per group of consecutive heads, (H|1,)."""
    if x.shape[-1] <= LARGEST and rows_by_kernel(x, by):
        found: tuple[Tensor] = _Norm.apply(0.0, DIVIDE, x, by)  # type: ignore[no-untyped-call]  # torch's own
        return found[0]
    return _divided(x, by)


def _divided(x: Tensor, by: Tensor) -> Tensor:
    # The gradient is a sum over all rows, too long for half precision.
    return (at_least_fp32(x) / _by_head(by, x)).to(x.dtype)


def _by_head(gain: Tensor, x: Tensor) -> Tensor:
    """Return a gain per group of heads as (H, 1, 1)."""
    share = x.shape[1] // gain.shape[0]
    return (gain if share == 1 else gain.repeat_interleave(share))[:, None, None]


class _Norm(torch.autograd.Function):
    """`normalised` and `divided` by kernels, of one tensor or two, which come before their gains."""

    @staticmethod
    def forward(ctx: Any, eps: float, kind: int, *given: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]  # torch's has no types
        ctx.eps, ctx.kind = eps, kind
        ctx.save_for_backward(*given)
        half = len(given) // 2
        return tuple(norm_rows(given[:half], given[half:], eps, kind))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]  # torch's has no types
        given, eps, kind = ctx.saved_tensors, ctx.eps, ctx.kind
        half = len(given) // 2
        if torch.is_grad_enabled():

            def form(*inputs: Tensor) -> tuple[Tensor, ...]:
                pairs = zip(inputs[:half], inputs[half:], strict=True)
                if kind == DIVIDE:
                    return tuple(_divided(x, by) for x, by in pairs)
                return tuple(_normalised(x, gain, eps, kind == LAYER) for x, gain in pairs)

            return None, None, *gradients_again(form, given, grads)
        return None, None, *norm_rows_backward(grads, given[:half], given[half:], eps, kind)


def _norm_fake(xs: list[Tensor], gains: list[Tensor], eps: float, kind: int) -> list[Tensor]:
    return [torch.empty_like(x) for x in xs]


@operator("norm_rows(Tensor[] xs, Tensor[] gains, float eps, int kind) -> Tensor[]", _norm_fake)
def norm_rows(xs: list[Tensor], gains: list[Tensor], eps: float, kind: int) -> list[Tensor]:
    """Return the rows of one or two tensors, normalised or divided."""
    from headwise.attend.attention import triton_head_rows

    ys = _norm_fake(xs, gains, eps, kind)
    triton_head_rows.norm(xs, gains, ys, eps, kind)
    return ys


def _norm_backward_fake(gs: list[Tensor], xs: list[Tensor], gains: list[Tensor], eps: float, kind: int) -> list[Tensor]:
    return [torch.empty_like(x) for x in (*xs, *gains)]


@operator(
    "norm_rows_backward(Tensor[] gs, Tensor[] xs, Tensor[] gains, float eps, int kind) -> Tensor[]", _norm_backward_fake
)
def norm_rows_backward(gs: list[Tensor], xs: list[Tensor], gains: list[Tensor], eps: float, kind: int) -> list[Tensor]:
    """Return the gradients of the tensors, then of the gains."""
    from headwise.attend.attention import triton_head_rows

    made = _norm_backward_fake(gs, xs, gains, eps, kind)
    triton_head_rows.norm_backward(gs, xs, gains, made[: len(xs)], made[len(xs) :], eps, kind)
    return made


def without_own(o: Tensor, v: Tensor, strength: Tensor, gain: Tensor | None, tanh: bool, tiny: float) -> Tensor:
    """Return o - strength·(o·v)v / max(‖v‖², tiny) for rows o and v, (B, H, T, D).

    Args:
        o, v: the rows.
        strength: 0-d; it gets no gradient.
        gain: a factor of the strength for each head, (H,), or None.
        tanh: take the tanh of the gain.
        tiny: lower bound of a squared norm.
    """
    if o.shape[-1] <= LARGEST and rows_by_kernel(o, v) and o.dtype == v.dtype:
        gate = 0 if gain is None else 2 if tanh else 1
        found: Tensor = _without_own_by_kernel(o, v, gain, *on_host(strength), gate, tiny)
        return found
    return _without_own(o, v, gain, strength, tanh, tiny)


def on_host(strength: Tensor) -> tuple[Tensor | None, float]:
    """Return a 0-d strength as a tensor of the device, or as a number if it lies on the host."""
    # Reading a number of the host waits for nothing. Cloned, because set() writes the next step's strength into the
    # same tensor, possibly before backward reads it.
    return (None, float(strength)) if strength.device.type == "cpu" else (strength.clone(), 0.0)


def _without_own(
    o: Tensor, v: Tensor, gain: Tensor | None, strength: Tensor | float, tanh: bool, tiny: float
) -> Tensor:
    own, wide = at_least_fp32(v), at_least_fp32(o)
    share = (wide * own).sum(-1, keepdim=True) / own.square().sum(-1, keepdim=True).clamp(min=tiny)
    if gain is not None:
        factor = at_least_fp32(gain)[:, None, None]
        strength = strength * (factor.tanh() if tanh else factor)
    return o - (strength * share * own).to(o.dtype)


_without_own_by_kernel = by_kernel(
    "without_own_rows(Tensor o, Tensor v, Tensor? gain, Tensor? strength, float number, int gate, float tiny)"
    " -> Tensor",
    lambda o, v, gain, strength, number, gate, tiny: _without_own(
        o, v, gain, number if strength is None else strength, gate == 2, tiny
    ),
    KERNELS,
    learned=3,
)


def mixed(x: Tensor, y: Tensor, gain: Tensor, of_x: float, of_y: float) -> Tensor:
    """Return x + gain·(of_x·x + of_y·y) for rows x and y, (B, H, T, D), and a gain per head, (H,)."""
    if x.shape[-1] <= LARGEST and rows_by_kernel(x, y, gain) and x.dtype == y.dtype:
        found: Tensor = _mixed_by_kernel(x, y, gain, of_x, of_y)
        return found
    return _mixed(x, y, gain, of_x, of_y)


def _mixed(x: Tensor, y: Tensor, gain: Tensor, of_x: float, of_y: float) -> Tensor:
    return x + _by_head(gain, x).to(x.dtype) * (of_x * x + of_y * y)


_mixed_by_kernel = by_kernel(
    "mix_rows(Tensor x, Tensor y, Tensor gain, float of_x, float of_y) -> Tensor", _mixed, KERNELS
)
