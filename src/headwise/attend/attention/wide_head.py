"""Attention of one head that is as wide as the model, of tokens to tokens like them, by plain products on CUDA.

Torch's fused kernels take heads of up to 256 channels; wider ones run several times slower than plain products. The
matrix of one head is computed in blocks of queries, forgotten, and computed again in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headwise.attend.attention.head_rows import normalised_rows
from headwise.attend.attention.softmax import fused
from headwise.numerics.kernels import gradients_again, operator, rows_by_kernel
from headwise.numerics.precision import at_least_fp32

# Largest head size of torch's fused kernels.
FUSED = 256
# Entries of the matrix (B, t, N) that are computed at once.
ENTRIES = 1 << 24


def mean_of_similar(y: Tensor, scale: float, allowed: Tensor | None, causal: bool) -> Tensor:
    """Return softmax(scale·x̂x̂ᵀ)·y with x̂ the tokens at length 1, (B, T, C); 0 for a token that may see none.

    Args:
        y: the tokens, (B, T, C).
        scale: factor of the cosines.
        allowed: bool, which tokens each token may see, broadcastable to (B, 1, T, T), or None.
        causal: whether token i sees tokens 0..i only; then `allowed` is None.
    """
    unit = normalised_rows(y.unsqueeze(1))
    if y.shape[-1] > FUSED and rows_by_kernel(y):
        seen = None if allowed is None else allowed.flatten(0, 1) if allowed.shape[1] == 1 else allowed[:, 0]
        found: Tensor = _Similar.apply(unit.squeeze(1), y, scale, causal, seen)  # type: ignore[no-untyped-call]  # torch's own
        return found
    return fused(unit, unit, y.unsqueeze(1), attn_mask=allowed, is_causal=causal, scale=scale).squeeze(1)


class _Similar(torch.autograd.Function):
    """Attention of tokens `unit` (B, T, C) to themselves with values (B, T, C), by blocks of queries."""

    @staticmethod
    def forward(  # type: ignore[override]  # torch's has no types
        ctx: Any, unit: Tensor, values: Tensor, scale: float, causal: bool, allowed: Tensor | None
    ) -> Tensor:
        ctx.settings = scale, causal
        ctx.save_for_backward(unit, values, allowed)
        with torch.autocast(unit.device.type, enabled=False):
            parts = [
                torch.bmm(_weights(unit, rows, keys, scale, causal, allowed), values[:, keys])
                for rows, keys in _blocks(unit, causal)
            ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # type: ignore[override]  # torch's has no types
        unit, values, allowed = ctx.saved_tensors
        scale, causal = ctx.settings
        if torch.is_grad_enabled():

            def form(unit: Tensor, values: Tensor) -> Tensor:
                weights = _softmax(at_least_fp32(torch.bmm(unit, unit.mT)), 0, scale, causal, allowed)
                return torch.bmm(weights.to(values.dtype), values)

            return *gradients_again(form, (unit, values), (g,)), None, None, None
        with torch.autocast(unit.device.type, enabled=False):
            return *_gradients(g, unit, values, scale, causal, allowed), None, None, None


def _blocks(unit: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of queries with the keys that they may see."""
    size, tokens = max(1, ENTRIES // (unit.shape[0] * unit.shape[1])), unit.shape[1]
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        yield slice(start, stop), slice(0, stop if causal else tokens)


def _weights(unit: Tensor, rows: slice, keys: slice, scale: float, causal: bool, allowed: Tensor | None) -> Tensor:
    """Return the weights of a block, (B, t, n)."""
    seen = None if allowed is None else _of_block(allowed, rows)
    found: Tensor = softmax_rows(_product(unit[:, rows], unit[:, keys].mT), seen, causal, scale, rows.start, unit.dtype)
    return found


def _softmax(products: Tensor, start: int, scale: float, causal: bool, allowed: Tensor | None) -> Tensor:
    """Return the weights of a block in the dtype of the products, (B, t, n), by operators of PyTorch."""
    products = products * scale
    if causal:
        later = torch.ones(products.shape[1:], dtype=torch.bool, device=products.device).triu(1 + start)
        products = products.masked_fill(later, float("-inf"))
    if allowed is None:
        return products.softmax(-1)
    # A row without keys has the softmax nan.
    return products.masked_fill(~allowed, float("-inf")).softmax(-1).masked_fill(~allowed.any(-1, keepdim=True), 0.0)


def _of_block(allowed: Tensor, rows: slice) -> Tensor:
    return allowed if allowed.shape[1] == 1 else allowed[:, rows]


def _weights_fake(
    products: Tensor, allowed: Tensor | None, causal: bool, scale: float, start: int, dtype: torch.dtype
) -> Tensor:
    return products.new_empty(products.shape, dtype=dtype)


@operator(
    "softmax_rows(Tensor products, Tensor? allowed, bool causal, float scale, int start, ScalarType dtype) -> Tensor",
    _weights_fake,
)
def softmax_rows(
    products: Tensor, allowed: Tensor | None, causal: bool, scale: float, start: int, dtype: torch.dtype
) -> Tensor:
    """Return the weights of a block whose first query is `start`, (B, t, n)."""
    from headwise.attend.attention import triton_softmax

    if products.shape[2] > triton_softmax.LONGEST:
        return _softmax(products, start, scale, causal, allowed).to(dtype)
    weights = _weights_fake(products, allowed, causal, scale, start, dtype)
    triton_softmax.softmax(products, allowed, causal, scale, start, weights)
    return weights


@operator(
    "softmax_rows_backward(Tensor slope, Tensor weights, float scale) -> Tensor",
    lambda slope, weights, scale: torch.empty_like(weights),
)
def softmax_rows_backward(slope: Tensor, weights: Tensor, scale: float) -> Tensor:
    """Return the gradient of the products, in the dtype of the weights, from that of the weights."""
    from headwise.attend.attention import triton_softmax

    if slope.shape[2] > triton_softmax.LONGEST:
        wide = weights.to(slope.dtype)
        return (wide * (slope - (wide * slope).sum(-1, keepdim=True)) * scale).to(weights.dtype)
    made = torch.empty_like(weights)
    triton_softmax.slope(slope, weights, scale, made)
    return made


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a product in fp32 or wider."""
    if a.dtype in (torch.float32, torch.float64):
        return torch.bmm(a, b)
    # On a CPU no product has another dtype than its factors.
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())


def _gradients(
    g: Tensor, unit: Tensor, values: Tensor, scale: float, causal: bool, allowed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the tokens at length 1 and of the values."""
    whole = None
    for rows, keys in _blocks(unit, causal):
        weights = _weights(unit, rows, keys, scale, causal, allowed)
        slope = softmax_rows_backward(_product(g[:, rows], values[:, keys].mT), weights, scale)
        of_values = torch.bmm(weights.mT, g[:, rows])
        of_rows = torch.bmm(slope, unit[:, keys])
        if rows == slice(0, unit.shape[1]):
            return torch.baddbmm(of_rows, slope.mT, unit), of_values
        if whole is None:
            whole = [torch.zeros(unit.shape, dtype=torch.float32, device=unit.device) for _ in range(2)]
        whole[0][:, rows] += of_rows
        whole[0][:, keys] += torch.bmm(slope.mT, unit[:, rows])
        whole[1][:, keys] += of_values
    assert whole is not None
    return whole[0].to(unit.dtype), whole[1].to(values.dtype)
