"""Rows moved to the mean over keys, or away from it, in one pass on CUDA by the kernels of `triton_means`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.attend.attention.head_rows import on_host
from headwise.attend.attention.matrix_free import FusedMap
from headwise.attend.core import Attend, Call
from headwise.numerics.kernels import gradients_again, operator, rows_by_kernel
from headwise.numerics.masked import mean_over_all, mean_over_earlier

SHARE, HEADS, CHANNELS = 0, 1, 2


def towards_mean(attend: Attend, share: Tensor, call: Call) -> Attend:
    """Return the map v -> (1 - share)·attend(v) + share·(mean of v over allowed keys).

    Args:
        attend: the map that is edited, (B, H, N, D) -> (B, H, T, D).
        share: 0-d; it gets no gradient where a kernel computes.
        call: the call, whose mask and causality say which keys are allowed.
    """

    def moved(v: Tensor) -> Tensor:
        if not share.requires_grad and _by_kernel(call, v):
            at, number = on_host(share)
            return _moved(attend, v, number, SHARE, call, *(() if at is None else (at,)))
        return call.towards_mean(attend(v), v, share)

    return moved


def from_mean(attend: Attend, gain: Tensor, call: Call) -> Attend:
    """Return the map v -> (1 + gain)·attend(v) - gain·(mean of v over allowed keys), for a gain per head, (H,)."""

    def moved(v: Tensor) -> Tensor:
        if _by_kernel(call, v, gain):
            return _moved(attend, v, 0.0, HEADS, call, gain)
        by_head = gain.to(v.dtype)[:, None, None]
        return (1 + by_head) * attend(v) - by_head * call.mean_over_keys(v)

    return moved


def by_channel(y: Tensor, mean_gain: Tensor, rest_gain: Tensor, call: Call) -> Tensor:
    """Return y + mean_gain·mean(y) + rest_gain·(y - mean(y)) for y (B, T, C), and gains per channel, (C,)."""
    rows = y.unsqueeze(1)
    if not call.causal and _by_kernel(call, rows, mean_gain, rest_gain):
        return _by_rows(rows, None, 0.0, CHANNELS, False, mean_gain, rest_gain).squeeze(1)
    mean = call.mean_over_keys(rows).squeeze(1)
    return y + mean_gain.to(y.dtype) * mean + rest_gain.to(y.dtype) * (y - mean)


def _by_kernel(call: Call, v: Tensor, *gains: Tensor) -> bool:
    return call.mask is None and not (call.causal and call.queries != call.keys) and rows_by_kernel(v, *gains)


def _moved(attend: Attend, v: Tensor, number: float, kind: int, call: Call, *gains: Tensor) -> Tensor:
    if not call.causal and isinstance(attend, FusedMap) and call.sinks is None and call.dropout == 0:
        # The weights of each query sum to 1 and leave a mean as it is: the values are moved, which takes fewer passes.
        return attend(_by_rows(v, None, number, kind, False, *gains))
    return _by_rows(attend(v), v, number, kind, call.causal, *gains)


def _by_rows(o: Tensor, v: Tensor | None, number: float, kind: int, causal: bool, *gains: Tensor) -> Tensor:
    found: Tensor = _Moved.apply(o, v, number, kind, causal, *gains)[0]  # type: ignore[no-untyped-call]  # torch's own
    return found


def form(o: Tensor, v: Tensor | None, number: float, kind: int, causal: bool, *gains: Tensor) -> Tensor:
    """Return what the kernels compute, by operators of PyTorch.

    Args:
        o: the rows, (B, H, T, D).
        v: the rows whose mean is taken, (B, H, N, D), or None if they are o.
        number: the share where no gain is given.
        kind: SHARE for one share of the mean, 0-d; HEADS for a gain per head; CHANNELS for two per channel.
        causal: whether the mean of query i is over keys 0..i.
        gains: a share on the device, or the gains.
    """
    v = o if v is None else v
    mean = mean_over_earlier(v, o.shape[2]) if causal else mean_over_all(v, v.shape[2])
    if kind == CHANNELS:
        of_mean, of_rest = (gain.to(o.dtype) for gain in gains)
        return o + of_mean * mean + of_rest * (o - mean)
    share: Any = gains[0].to(o.dtype) if gains else number
    if kind == HEADS:
        share = -share[:, None, None]
    return (1 - share) * o + share * mean


class _Moved(torch.autograd.Function):
    """`form` by kernels; the second result, which backward reads, are sums of v."""

    @staticmethod
    def forward(  # type: ignore[override]  # torch's has no types
        ctx: Any, o: Tensor, v: Tensor | None, number: float, kind: int, causal: bool, *gains: Tensor
    ) -> tuple[Tensor, Tensor]:
        y, sums = moved_rows(o, o if v is None else v, gains, number, kind, causal)
        ctx.settings = number, kind, causal
        ctx.save_for_backward(o, v, sums, *gains)
        ctx.mark_non_differentiable(sums)
        return y, sums

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Any, ...]:  # type: ignore[override]  # torch's has no types
        o, v, sums, *gains = ctx.saved_tensors
        number, kind, causal = ctx.settings
        if torch.is_grad_enabled():

            def of(o: Tensor, v: Tensor | None, *gains: Tensor) -> Tensor:
                return form(o, v, number, kind, causal, *gains)

            do, dv, *dgains = gradients_again(of, (o, v, *gains), (g,))
            return do, dv, None, None, None, *dgains
        same = v is None
        values = o if v is None else v
        # Rows are read again for the gradient of a gain alone.
        read = (g, g) if kind == SHARE else (o, values)
        do, *found = moved_rows_backward(g, *read, sums, gains, number, kind, causal, values.shape[2], same)
        dv = None if same else found.pop(0).expand(values.shape)
        if kind == CHANNELS:
            found = [*found[0]]
        return do, dv, None, None, None, *(found if kind != SHARE else [None] * len(gains))


def _moved_fake(
    o: Tensor, v: Tensor, gains: list[Tensor], number: float, kind: int, causal: bool
) -> tuple[Tensor, Tensor]:
    # The chunks of `triton_means.CHUNK` rows.
    sums = o.new_empty(*v.shape[:2], -(-v.shape[2] // 128), v.shape[3], dtype=torch.float32)
    return torch.empty_like(o), sums


@operator(
    "moved_rows(Tensor o, Tensor v, Tensor[] gains, float number, int kind, bool causal) -> (Tensor, Tensor)",
    _moved_fake,
)
def moved_rows(
    o: Tensor, v: Tensor, gains: list[Tensor], number: float, kind: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return what `form` does, and the sums of chunks of v."""
    from headwise.attend.attention import triton_means

    y = torch.empty_like(o)
    return y, triton_means.towards(o, v, gains, number, kind, causal, y)


def _moved_backward_fake(
    g: Tensor,
    o: Tensor,
    v: Tensor,
    sums: Tensor,
    gains: list[Tensor],
    number: float,
    kind: int,
    causal: bool,
    keys: int,
    same: bool,
) -> list[Tensor]:
    made = [torch.empty_like(o)]
    if not same:
        made.append(torch.empty_like(v) if causal else v.new_empty(*v.shape[:2], 1, v.shape[3]))
    if kind == HEADS:
        made.append(torch.empty_like(gains[0]))
    if kind == CHANNELS:
        made.append(gains[0].new_empty(2, o.shape[3]))
    return made


@operator(
    "moved_rows_backward(Tensor g, Tensor o, Tensor v, Tensor sums, Tensor[] gains, float number, int kind, "
    "bool causal, int keys, bool same) -> Tensor[]",
    _moved_backward_fake,
)
def moved_rows_backward(
    g: Tensor,
    o: Tensor,
    v: Tensor,
    sums: Tensor,
    gains: list[Tensor],
    number: float,
    kind: int,
    causal: bool,
    keys: int,
    same: bool,
) -> list[Tensor]:
    """Return the gradients of o, of v unless it is the same, and of the gains, two per channel as one tensor.

    Not causal, the gradient of v is one row for all `keys`.
    """
    from headwise.attend.attention import triton_means

    made = _moved_backward_fake(g, o, v, sums, gains, number, kind, causal, keys, same)
    triton_means.towards_backward(g, o, v, sums, gains, number, kind, causal, keys, same, made)
    return made
