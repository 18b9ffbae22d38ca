"""Which of a call's keys are the queries' own tokens: caches put older ones before them, static ones empty places
behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.attention.fitted_layer import FittedLayer
from headwise.core.remedies import LEAVE_OUT
from headwise.hosts.transformers.routed import Routed


def newest_last(
    adapter: Routed, fitted: FittedLayer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return keys, values and mask in an order in which the queries' own tokens are the last, as a growing cache has
    them.

    Attention does not depend on the order of keys; methods that compare a token with its own values do.

    Raises:
        RuntimeError: where such a method stands on a layer whose keys are not its own tokens.
    """
    queries, keys = q.shape[2], k.shape[2]
    if causal and keys > queries:
        # A static cache's first filling: the places behind the queries are empty.
        return k[:, :, :queries], v[:, :, :queries], mask
    if not fitted.needs_own_tokens():
        return k, v, mask
    layer = _layer(adapter)
    if isinstance(getattr(layer, "cumulative_length", None), Tensor) and layer.keys.shape[2] == keys:
        return _rotated(layer, k, v, mask)
    seen = queries if layer is None else layer.get_seq_length()
    if keys < queries or (not isinstance(seen, Tensor) and keys > seen):
        raise RuntimeError(
            f"{adapter.site.name} attends from {queries} tokens to {keys} keys that are not these tokens and their "
            "past; methods "
            f"that compare a token with its own value have no meaning there: {LEAVE_OUT}"
        )
    return k, v, mask


def _layer(adapter: Routed) -> Any:
    """Return the cache's layer that holds the keys of this module, or None without a cache."""
    index = getattr(adapter.site.module, "layer_idx", None)
    layers = getattr(getattr(adapter.cache, "self_attention_cache", adapter.cache), "layers", ())
    if index is None or index >= len(layers):
        return None
    # Layers that take over the keys of an earlier one have a place in the cache without any (Gemma 3n): they are those
    # of the last layer before it that has its own, of the same kind (sliding or not).
    kinds = getattr(adapter.site.module.config, "layer_types", None) or [None] * len(layers)
    own = [
        i for i in range(index + 1) if kinds[i] == kinds[index] and callable(getattr(layers[i], "get_seq_length", None))
    ]
    return layers[own[-1]] if own else None


def _rotated(layer: Any, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    # A sliding static layer that is full keeps its newest tokens last by itself.
    if mask is None or getattr(layer, "cumulative_length_int", -1) >= layer.max_cache_len:
        return k, v, mask
    places = (torch.arange(k.shape[2], device=k.device) + layer.cumulative_length) % k.shape[2]
    if mask.shape[-1] > 1:
        mask = mask.index_select(-1, places)
    return k.index_select(2, places), v.index_select(2, places), mask
