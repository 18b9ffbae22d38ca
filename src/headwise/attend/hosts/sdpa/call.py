"""The replacement of `F.scaled_dot_product_attention`, which routes calls inside a fitted site through its methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.attention.softmax import fused
from headwise.attend.hosts.sdpa.open_sites import serving
from headwise.attend.hosts.sdpa.shape import SERVED, Served, Shape, broadcast, samples_of, with_causality
from headwise.attend.projections import stand_ins
from headwise.numerics.masked import hide_other_regions, visible


def newest_last(
    fitted: FittedLayer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return keys, values and mask ordered so that the queries' own tokens come last, as in a growing cache.

    Attention does not depend on the order of keys; methods that compare a token with its own values do.
    """
    queries, keys = q.shape[2], k.shape[2]
    if keys <= queries or not fitted.needs_own_tokens():
        return k, v, mask
    if causal:
        # The first call with a static cache: no query sees a key after the queries' own.
        return k[:, :, :queries], v[:, :, :queries], mask
    if mask is None:
        return k, v, mask
    places = (torch.arange(keys, device=k.device) + _end(mask, queries, keys)[:, None]) % keys
    places = places.expand(k.shape[0], -1)
    k, v = (x.gather(2, places[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3])) for x in (k, v))
    if mask.shape[-1] > 1:
        rows = mask.expand(k.shape[0], *mask.shape[1:])
        mask = rows.gather(3, places[:, None, None].expand(*rows.shape[:3], -1))
    return k, v, mask


def _end(mask: Tensor, queries: int, keys: int) -> Tensor:
    """Return the position after the newest token of each sample, (B|1,).

    Query i is the token at (number of earlier tokens) + i and sees nothing after itself; padded queries see less.
    """
    seen = visible(mask)
    place = torch.arange(seen.shape[-1], device=seen.device)
    last = torch.where(seen, place, -1).amax((1, 3))
    ahead = torch.arange(queries - last.shape[1], queries, device=seen.device)
    before = (last - ahead).amax(1)
    return (before + queries).clamp(queries, keys)


class _Replacement:
    """Whether `routed` replaces the function, and the function it replaced, which serves calls outside fitted sites.

    `plain` is kept after the function was restored: a garbage collection may restore it while a call is running.
    """

    on = False
    plain: Callable[..., Tensor] = fused


replacement = _Replacement()


def stand_in() -> None:
    """Replace the function by `routed`, unless it is replaced already, perhaps below another library's wrapper."""
    with stand_ins.lock:
        now = stand_ins.fused()
        if now is routed or (replacement.on and now is not replacement.plain):
            return
        replacement.on, replacement.plain = True, now
        stand_ins.set_fused(routed)


def step_aside() -> None:
    """Restore the function when no fitted site is left; below another library's wrapper, stay and forward calls."""
    with stand_ins.lock:
        left = any(f.site.host in SERVED for f in FittedLayer.live())
        if not left and stand_ins.fused() is routed:
            stand_ins.set_fused(replacement.plain)
            replacement.on = False


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
    """Replace `F.scaled_dot_product_attention`: route calls inside a fitted site through its methods."""
    plain = replacement.plain
    adapter = serving()
    if adapter is None:
        return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    fitted = adapter.fitted
    assert fitted is not None

    def original() -> tuple[Tensor, None]:
        return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa), None

    return serve(adapter, query, key, value, original, mask=attn_mask, dropout=dropout_p, causal=is_causal, scale=scale)


def serve(
    adapter: Served,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    original: Callable[[], tuple[Tensor, None]],
    *,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Return the attention of a call (..., T, D) with the site's methods; `original` is the host's own computation."""
    fitted = adapter.fitted
    assert fitted is not None
    training = fitted.site.module.training
    _record(adapter, fitted, query, key, value)
    shape = Shape.of(adapter, query, key)
    q, k, v = broadcast(shape.to4(query), shape.to4(key), shape.to4(value))
    adapter.limits.check(fitted.site, q, k, causal, training)
    text, apart, across = adapter.other_tokens(q.shape[2], k.shape[2])
    adapter.limits.check_tokens(fitted.site, apart, across)
    samples = samples_of(fitted, adapter.limits, shape, q.shape[0])

    def own() -> tuple[Tensor, None]:
        return shape.to4(original()[0]), None

    mask, causal = _masking(fitted, shape.mask4(mask), causal, q, k)
    if not training:
        k, v, mask = newest_last(fitted, q, k, v, mask, causal)
    settings: dict[str, Any] = {"mask": mask, "causal": causal, "scale": scale, "dropout": dropout, "samples": samples}
    out, _ = fitted.attention(q, k, v, own, training=training, text=text, cross=across, **settings)
    return shape.from4(out)


def _record(adapter: Served, fitted: FittedLayer, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Record the call, with the number of rows that entered the layer, while the model runs on an example."""
    if adapter.record is not None:
        entered = fitted.entered.latest
        adapter.record.append((q, k, v, 0 if entered is None else entered.shape[0]))


def _masking(
    fitted: FittedLayer, mask: Tensor | None, causal: bool, q: Tensor, k: Tensor
) -> tuple[Tensor | None, bool]:
    """Return the mask (B|1, H|1, T, N), and whether causality must be added to it."""
    if mask is not None and fitted.site.shifted and mask.dtype != torch.bool:
        mask = hide_other_regions(mask)
    if mask is not None and causal:
        # Some of torch's kernels accept a mask with causality, others raise: one combined mask works for all.
        return with_causality(mask, q.shape[2], k.shape[2]), False
    return mask, causal


# Code that replaces the function by its name, such as torch's context_parallel, must find this name.
routed.__name__ = "scaled_dot_product_attention"
