"""Static caches: their new tokens stand in the middle, with empty places behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .hugging_face import HuggingFaceAdapter


def newest_last(
    adapter: HuggingFaceAdapter, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Give keys, values and mask in an order in which the queries' own tokens are the last, as a growing cache has them.

    Attention does not depend on the order of keys; methods that compare a token with its own values do.
    """
    if causal and k.shape[2] > q.shape[2]:
        # A static cache's first filling: the places behind the queries are empty.
        return k[:, :, : q.shape[2]], v[:, :, : q.shape[2]], mask
    layer = _static_layer(adapter, k) if _asks_for_own_tokens(adapter) else None
    if layer is None or mask is None:
        return k, v, mask
    places = (torch.arange(k.shape[2], device=k.device) + layer.cumulative_length) % k.shape[2]
    if mask.shape[-1] > 1:
        mask = mask.index_select(-1, places)
    return k.index_select(2, places), v.index_select(2, places), mask


def _asks_for_own_tokens(adapter: HuggingFaceAdapter) -> bool:
    fitted = adapter.fitted
    return adapter.cache is not None and (fitted.shares_values or any(m.carries for m in fitted.methods))


def _static_layer(adapter: HuggingFaceAdapter, k: Tensor) -> Any:
    """Give the layer of a static cache that was not filled up by this call, or None."""
    cache, index = adapter.cache, getattr(adapter.site.module, "layer_idx", None)
    if adapter.site.is_cross or index is None:
        return None
    cache = getattr(cache, "self_attention_cache", cache)
    layers = getattr(cache, "layers", ())
    layer = layers[index] if index < len(layers) else None
    if not isinstance(getattr(layer, "cumulative_length", None), Tensor) or layer.keys.shape[2] != k.shape[2]:
        return None
    # A sliding static layer that is full keeps its newest tokens last by itself.
    full = getattr(layer, "cumulative_length_int", 0) >= layer.max_cache_len
    return None if full else layer
