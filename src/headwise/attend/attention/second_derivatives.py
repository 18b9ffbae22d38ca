"""Gradients that can be differentiated again, of operators whose own backward cannot: those of the whole matrix.

A gradient penalty or a Hessian asks for them with `create_graph=True`. They hold matrices (B, H, T, N).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headwise.attend.attention.element_draw import Drawn
from headwise.attend.attention.matrix import overlap_of
from headwise.numerics.masked import allowed_keys, masked_logits
from headwise.numerics.precision import at_least_fp32


def gradients(
    form: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], of_outputs: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients of an operator's inputs with a graph, of those that need one; None for the others.

    Args:
        form: computes the outputs from these inputs by operations that torch differentiates.
        inputs: q, k, v and others, as they entered the operator.
        of_outputs: the gradients of the outputs; None for unused ones.
    """
    # Views, as the host may give one tensor as queries and keys.
    inputs = [x.view_as(x) for x in inputs]
    with torch.autocast(inputs[0].device.type, enabled=False):
        outputs = form(*inputs)
    pairs = [(x, g) for x, g in zip(outputs, of_outputs, strict=True) if g is not None and x.requires_grad]
    needed = [x for x in inputs if x.requires_grad]
    found = iter(
        torch.autograd.grad([x for x, _ in pairs], needed, [g for _, g in pairs], create_graph=True, allow_unused=True)
    )
    return [next(found) if x.requires_grad else None for x in inputs]


def rows_by_matrix(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `attend_rows` returns."""
    s, empty = _logits(q, k, mask, causal, scale)
    lse = s.logsumexp(-1)
    logp = s - lse[..., None]
    p = logp.exp().masked_fill(empty[..., None], 0.0)
    # The product of a weight of 0 and its logarithm is 0, not nan.
    entropy = -(p * logp.masked_fill(s == float("-inf"), 0.0)).sum(-1)
    out = torch.matmul(p, at_least_fp32(_by_head(v, q))).to(v.dtype)
    return out, lse.masked_fill(empty, 0.0), entropy, p.square().sum(-1)


def dropped_by_matrix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    drawn: Drawn,
    renormalize: bool,
    first: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the first two results of `attend_dropped`; `first` is its third."""
    s, empty = _logits(q, k, mask, causal, scale)
    samples, heads, queries = (slice(0, n) for n in q.shape[:3])
    kept = drawn.block(samples, heads, queries, k.shape[2], s.dtype)
    if renormalize:
        at = first.clamp(min=0).long().unsqueeze(-1)
        kept = kept.scatter(-1, at, torch.maximum(kept.gather(-1, at), (first >= 0).unsqueeze(-1).to(kept.dtype)))
        s = s.masked_fill((kept == 0) & ~empty[..., None], float("-inf"))
    lse = s.logsumexp(-1)
    p = (s - lse[..., None]).exp().masked_fill(empty[..., None], 0.0)
    a = p if renormalize else p * kept * drawn.scale()
    out = torch.matmul(a, at_least_fp32(_by_head(v, q))).to(v.dtype)
    return out, lse.masked_fill(empty, 0.0)


def overlap_by_matrix(
    q: Tensor, k: Tensor, mask: Tensor | None, real: Tensor | None, sinks: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """Return what `head_overlap` returns."""
    s, empty = _logits(q, k, mask, causal, scale)
    total = s.logsumexp(-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.to(s.dtype)[None, :, None, None])
    return overlap_of((s - total).exp().masked_fill(empty[..., None], 0.0), real)


def _logits(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return the masked logits (B, H, T, N), 0 in rows without allowed keys, and which rows these are (B, H, T)."""
    s = torch.matmul(at_least_fp32(q) * scale, at_least_fp32(_by_head(k, q)).transpose(-1, -2))
    known = mask if mask is not None and mask.dtype == torch.bool else None
    s = masked_logits(s, mask, allowed_keys(known, causal, slice(0, q.shape[2]), k.shape[2], q.device))
    empty = (s.detach() == float("-inf")).all(-1)
    return s.masked_fill(empty[..., None], 0.0), empty


def _by_head(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values (B, G, N, D) for each of q's heads."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)
