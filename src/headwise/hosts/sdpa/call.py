"""The stand-in for `torch.nn.functional.scaled_dot_product_attention`: calls inside a fitted site go through its methods."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.softmax import fused
from headwise.core.live_sites import live_sites
from headwise.core.masked import hide_other_regions
from headwise.hosts.sdpa.cache import newest_last
from headwise.hosts.sdpa.limits import samples_of
from headwise.hosts.sdpa.open_sites import serving
from headwise.hosts.sdpa.shape import Shape, broadcast, with_causality


class _Standing:
    """Whether `routed` stands in the function's place, and what stood there before; calls outside of fitted sites go there.

    `plain` stays after the function was given back: a garbage collection may do that while a call is on its way.
    """

    on = False
    plain: Callable[..., Tensor] = fused


standing = _Standing()


def stand_in() -> None:
    """Put `routed` in the place of the function, unless it stands there, or below somebody else's wrapper."""
    now = F.scaled_dot_product_attention
    if now is routed or (standing.on and now is not standing.plain):
        return
    standing.on, standing.plain = True, now
    F.scaled_dot_product_attention = routed


def step_aside() -> None:
    """Give the function back when no fitted site is left; below somebody else's wrapper, stay and pass calls on."""
    left = any(f.site.host == "fused" for f in live_sites())
    if not left and F.scaled_dot_product_attention is routed:
        F.scaled_dot_product_attention = standing.plain
        standing.on = False


def routed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Stand in for `F.scaled_dot_product_attention`: calls inside a fitted site go through its methods."""
    plain = standing.plain
    adapter = serving()
    if adapter is None:
        return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    fitted = adapter.fitted
    assert fitted is not None
    training = fitted.site.module.training
    if adapter.record is not None:
        entered = fitted.entered.latest
        adapter.record.append((query, key, value, 0 if entered is None else entered.shape[0]))
    shape = Shape.of(adapter, query, key)
    q, k, v = broadcast(shape.to4(query), shape.to4(key), shape.to4(value))
    adapter.limits.check(fitted.site, q, k, is_causal, training)
    samples = samples_of(fitted, adapter.limits, shape, q.shape[0])

    def original() -> tuple[Tensor, None]:
        out = plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return shape.to4(out), None

    mask = shape.mask4(attn_mask)
    if mask is not None and fitted.site.shifted and mask.dtype != torch.bool:
        mask = hide_other_regions(mask)
    if mask is not None and is_causal:
        # Some of torch's kernels take both, others raise: one mask serves all.
        mask, is_causal = with_causality(mask, q.shape[2], k.shape[2]), False
    if not training:
        k, v, mask = newest_last(fitted, q, k, v, mask, is_causal)
    out, _ = fitted.attention(
        q,
        k,
        v,
        original,
        training=training,
        mask=mask,
        causal=is_causal,
        scale=scale,
        dropout=dropout_p,
        samples=samples,
    )
    return shape.from4(out)


# Whoever replaces the function by its name, as torch's context_parallel does, must find its place.
routed.__name__ = "scaled_dot_product_attention"
