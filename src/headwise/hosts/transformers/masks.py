"""Determine which keys each query sees, from a mask of any form and from the cache."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from headwise.attention.fitted_layer import FittedLayer
from headwise.core.masked import visible
from headwise.core.packed import Packed, order
from headwise.core.remedies import LEAVE_OUT
from headwise.hosts.transformers.routed import Routed


def newest_last(
    adapter: Routed, fitted: FittedLayer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return keys, values and mask ordered so that the queries' own tokens come last, as in a growing cache.

    Attention does not depend on the order of keys; methods that compare a token with its own values do.

    Raises:
        RuntimeError: if such a method is on a layer whose keys are not its own tokens.
    """
    queries, keys = q.shape[2], k.shape[2]
    if causal and keys > queries:
        # The first call with a static cache: the positions after the queries are empty.
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
            f"past; methods that compare a token with its own value have no meaning there: {LEAVE_OUT}"
        )
    return k, v, mask


def _layer(adapter: Routed) -> Any:
    """Return the layer of the cache with the keys of this module, or None without a cache."""
    index = getattr(adapter.site.module, "layer_idx", None)
    layers = getattr(getattr(adapter.cache, "self_attention_cache", adapter.cache), "layers", ())
    if index is None or index >= len(layers):
        return None
    # Layers that share the keys of an earlier layer have an empty entry in the cache (Gemma 3n). The keys are those of
    # the last earlier layer with its own keys, of the same kind (sliding or not).
    kinds = getattr(adapter.site.module.config, "layer_types", None) or [None] * len(layers)
    own = [
        i for i in range(index + 1) if kinds[i] == kinds[index] and callable(getattr(layers[i], "get_seq_length", None))
    ]
    return layers[own[-1]] if own else None


def _rotated(layer: Any, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    # A full sliding static layer already keeps its newest tokens last.
    if mask is None or getattr(layer, "cumulative_length_int", -1) >= layer.max_cache_len:
        return k, v, mask
    places = (torch.arange(k.shape[2], device=k.device) + layer.cumulative_length) % k.shape[2]
    if mask.shape[-1] > 1:
        mask = mask.index_select(-1, places)
    return k.index_select(2, places), v.index_select(2, places), mask


LIBRARY = "torch.nn.attention.flex_attention"


def is_block_mask(mask: Any) -> bool:
    """Return whether a mask is a BlockMask of flex attention."""
    return LIBRARY in sys.modules and isinstance(mask, sys.modules[LIBRARY].BlockMask)


def of_blocks(mask: Any, rows: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return what a BlockMask allows at rows, queries and keys that broadcast, bool: its blocks, and inside them its
    mask function."""
    dense = mask.to_dense().bool().to(queries.device)
    of_queries, of_keys = mask.BLOCK_SIZE
    head = torch.zeros_like(queries)
    blocks = dense[rows % dense.shape[0], head % dense.shape[1], queries // of_queries, keys // of_keys]
    inside: Tensor = mask.mask_mod(rows, head, queries, keys)
    return blocks & inside


def visible_at(mask: Any, rows: Tensor, queries: Tensor, keys: int) -> Tensor:
    """Return which of the keys 0..N-1 the queries (q,) of rows (R,) may see in any head, bool (R, q, N)."""
    if is_block_mask(mask):
        places = torch.arange(keys, device=queries.device)
        return of_blocks(mask, rows[:, None, None], queries[None, :, None], places[None, None])
    seen = visible(mask[:, :, queries] if mask.shape[-2] > 1 else mask).any(1)
    return seen.expand(len(rows), -1, -1)


def seeing_themselves(mask: Any, tokens: int) -> Tensor | None:
    """Return which tokens of self attention see themselves, bool (B|1, T), as real tokens do; None if all do or if
    unknown."""
    if is_block_mask(mask) and tuple(mask.seq_lengths) == (tokens, tokens):
        rows = torch.arange(mask.shape[0], device=mask.kv_num_blocks.device)
        every = torch.arange(tokens, device=rows.device)
        return of_blocks(mask, rows[:, None], every[None], every[None])
    if not isinstance(mask, Tensor) or mask.shape[-1] != tokens:
        return None
    if mask.dim() == 2:
        return mask.bool()
    if mask.dim() != 4 or mask.shape[-2] != tokens:
        return None
    return visible(mask).diagonal(dim1=-2, dim2=-1).any(1)


def matrix_of(
    mask: Any, q: Tensor, keys: int, causal: bool, window: int | None, packed: Packed | None, kept: bool
) -> tuple[Tensor | None, bool]:
    """Return the mask of a call and whether causality must be added to it, for a mask that is not a 4D tensor.

    Args:
        mask: None, a padding mask (B, N) as flash kernels take it, or a BlockMask, which includes causality and window.
        q: the queries (B, H, T, D).
        keys: the number of keys N.
        causal: whether a query sees no later key; the last query is the token of the last key.
        window: how many positions a query sees to each side, its own included; None for all.
        packed: how the rows pack several sequences; the mask is then that of the sequences, (S, 1, L|1, L).
        kept: whether the host's kernel computes the output; readings then take causality and a mask of keys together
            instead of a mask L x L.
    """
    rows, queries = q.shape[0], q.shape[2]
    if is_block_mask(mask):
        query_places, key_places = (
            torch.arange(queries, device=q.device)[:, None],
            torch.arange(keys, device=q.device)[None],
        )
        samples = torch.arange(rows, device=q.device)[:, None, None]
        if packed is None:
            return of_blocks(mask, samples, query_places[None], key_places[None]).unsqueeze(1), False
        row, place = packed.starts // packed.tokens, packed.places % packed.tokens
        own = of_blocks(mask, row[:, None, None], place[:, :, None], place[:, None, :])
        return (own & packed.real[:, None, :]).unsqueeze(1), False
    # A window as long as the row hides nothing; the host omits it too.
    window = None if window is None or keys <= window else window
    if packed is not None:
        return (
            (packed.mask(False, None), True)
            if kept and causal and window is None
            else (packed.mask(causal, window), False)
        )
    if mask is None and window is None and (not causal or queries == keys):
        return None, causal
    seen = order(queries, keys, causal, window, q.device)[None, None]
    return (seen if mask is None else seen & mask.bool()[:, None, None, -keys:]), False
