"""Which keys of a call of the function are the queries' own tokens: static caches keep empty places behind them, which
the mask alone tells."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attention.fitted_layer import FittedLayer
from headwise.core.masked import visible


def newest_last(
    fitted: FittedLayer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return keys, values and mask in an order in which the queries' own tokens are the last, as a growing cache has
    them.

    Attention does not depend on the order of keys; methods that compare a token with its own values do.
    """
    queries, keys = q.shape[2], k.shape[2]
    if keys <= queries or not fitted.needs_own_tokens():
        return k, v, mask
    if causal:
        # A static cache's first filling: no query sees a place behind the queries.
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
    """Return the place behind the newest token of each sample, (B|1,).

    Query i is the token at (tokens before it) + i and sees nothing behind itself; padded queries see less than that.
    """
    seen = visible(mask)
    place = torch.arange(seen.shape[-1], device=seen.device)
    last = torch.where(seen, place, -1).amax((1, 3))
    ahead = torch.arange(queries - last.shape[1], queries, device=seen.device)
    before = (last - ahead).amax(1)
    return (before + queries).clamp(queries, keys)
