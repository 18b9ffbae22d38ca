"""Determine which keys each query sees, and which sequences a row packs, as the host's own attention separates them.

Flash kernels, and functions that get no mask, separate sequences by `cu_seq_lens_q`, or by positions that restart in a
single row without padding. Masks separate sequences whose positions are not consecutive; tokens that see each other by
the mask are one sequence.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.core import Packed, Site
from headwise.attend.core.packed import order
from headwise.attend.core.shared_state import Running, paddings
from headwise.borders import in_backward
from headwise.files.errors import LEAVE_OUT
from headwise.numerics.masked import visible

# Implementations with masks (B, 1, T, N), which headwise computes itself. All others are kernels, which still run:
# methods act before and after them.
PLAIN = ("eager", "sdpa")
# Separates sequences only by its mask, which includes the positions.
FLEX = "flex_attention"


def is_flash(implementation: str) -> bool:
    """Return whether an implementation separates sequences as flash kernels do: by padding, bounds or positions."""
    return "flash" in implementation


def newest_last(
    fitted: FittedLayer, cache: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return keys, values and mask ordered so that the queries' own tokens come last, as in a growing cache.

    Attention does not depend on the order of keys; methods that compare a token with its own values do. `cache` is that
    of the running forward, or None.

    Raises:
        RuntimeError: if such a method is on a layer whose keys are not its own tokens.
    """
    queries, keys = q.shape[2], k.shape[2]
    if causal and keys > queries:
        # The first call with a static cache: the positions after the queries are empty.
        return k[:, :, :queries], v[:, :, :queries], mask
    if not fitted.needs_own_tokens():
        return k, v, mask
    layer = _layer(fitted.site, cache)
    if isinstance(getattr(layer, "cumulative_length", None), Tensor) and layer.keys.shape[2] == keys:
        return _rotated(layer, k, v, mask)
    seen = queries if layer is None else layer.get_seq_length()
    if keys < queries or (not isinstance(seen, Tensor) and keys > seen):
        raise RuntimeError(
            f"{fitted.site.name} attends from {queries} tokens to {keys} keys that are not these tokens and their "
            f"past; methods that compare a token with its own value have no meaning there: {LEAVE_OUT}"
        )
    return k, v, mask


def _layer(site: Site, cache: Any) -> Any:
    """Return the layer of the cache with the keys of this module, or None without a cache."""
    index = getattr(site.module, "layer_idx", None)
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    if index is None or index >= len(layers):
        return None
    # Layers that share the keys of an earlier layer have an empty entry in the cache (Gemma 3n). The keys are those of
    # the last earlier layer with its own keys, of the same kind (sliding or not).
    kinds = getattr(site.module.config, "layer_types", None) or [None] * len(layers)
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
        causal: whether a query sees no later key; the last query is the token of the last key.
        window: how many positions a query sees to each side, its own included; None for all.
        packed: how the rows pack several sequences; the mask is then that of the sequences, (S, 1, L|1, L).
        kept: whether the host's kernel computes the output; readings then take causality and a mask of keys together
            instead of a mask L x L.
    """
    rows, queries = q.shape[0], q.shape[2]
    if is_block_mask(mask):
        query_places = torch.arange(queries, device=q.device)[:, None]
        key_places = torch.arange(keys, device=q.device)[None]
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


COMPILED = (
    "{name} is called on rows that hold several sequences inside a compiled graph, whose shapes cannot depend on "
    "their bounds: compile only the parts next to attention, for example `layer.mlp.compile()` of each layer, or train "
    "on one sequence per row"
)


def packing_of(
    name: str, implementation: str, kwargs: dict[str, Any], shape: tuple[int, int], now: Running
) -> Packed | None:
    """Return how the rows (B, T) of a call pack several sequences, or None if each row is one sequence.

    Args:
        implementation: its attention implementation. Without a mask, sdpa and flex attention see one sequence; all
            others separate sequences as flash kernels do.
        now: the running forward, which caches the result for the layers that follow.

    Raises:
        RuntimeError: if queries and keys are in different sequences, if the last sequence does not end with the row, or
            in a compiled graph.
    """
    bounds, mask = kwargs.get("cu_seq_lens_q"), kwargs.get("attention_mask")
    without_mask = mask is None and implementation not in (*PLAIN, FLEX)
    if without_mask and bounds is not None:
        if torch.compiler.is_compiling():
            raise RuntimeError(COMPILED.format(name=name))
        return _cached(
            now, (id(bounds), shape), bounds, lambda: _of_bounds(name, bounds, kwargs.get("cu_seq_lens_k"), shape, now)
        )
    # Some models do not pass the positions, by which they make the mask, to their layers (CTRL).
    positions = kwargs.get("position_ids") if without_mask else kwargs.get("position_ids", now.positions)
    # A layer that runs again in backward belongs to an earlier forward.
    may_pack = now.may_pack or (not torch.compiler.is_compiling() and in_backward())
    if not may_pack or not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] != shape[1]:
        return None
    # Flash kernels use positions if there is one row and no padding; for the others the mask includes them.
    if shape[1] < 2 or not (shape[0] == 1 if without_mask else _may_separate(mask, shape[1])):
        return None
    if torch.compiler.is_compiling():
        one_sequence_a_row(_ran, positions, name)
        return None
    # Fake tensors, on which code for another device is tried, have no numbers.
    if type(positions).__name__ == "FakeTensor":
        return None
    if without_mask:
        return _cached(now, (id(positions), shape), positions, lambda: _of_flash(positions, now))
    key = id(positions), id(mask), shape
    return _cached(now, key, (positions, mask), lambda: _of_mask(positions, mask, shape, now))


# The operator counts its runs here: one without a side effect would be removed from a compiled graph.
_ran = torch.zeros((), dtype=torch.int64)


@torch.library.custom_op("headwise::one_sequence_a_row", mutates_args={"ran"})
def one_sequence_a_row(ran: Tensor, positions: Tensor, name: str) -> None:
    """Raise RuntimeError if a compiled graph runs on rows whose positions (B, T) restart."""
    ran.add_(1)
    if bool((positions.diff(dim=1) != 1).any()):
        raise RuntimeError(COMPILED.format(name=name))


one_sequence_a_row.register_fake(lambda *_: None)


def _cached(now: Running, key: Any, tensors: Any, compute: Any) -> Packed | None:
    # The tensors are stored too, so that no other tensor gets the same id.
    if key not in now.packings:
        now.packings[key] = tensors, compute()
    packing: Packed | None = now.packings[key][1]
    return packing


def _may_separate(mask: Any, tokens: int) -> bool:
    """Return whether a mask may separate the sequences of a row."""
    if is_block_mask(mask):
        return tuple(mask.seq_lengths) == (tokens, tokens)
    return isinstance(mask, Tensor) and mask.dim() == 4 and tuple(mask.shape[-2:]) == (tokens, tokens)


def _of_bounds(name: str, bounds: Tensor, of_keys: Any, shape: tuple[int, int], now: Running) -> Packed | None:
    different = of_keys is not None and of_keys is not bounds and not torch.equal(of_keys, bounds)
    if different or int(bounds[0]) != 0 or int(bounds[-1]) != shape[0] * shape[1]:
        reason = (
            "its keys are in other sequences than its queries"
            if different
            else f"it has {shape[0]} x {shape[1]} tokens"
        )
        raise RuntimeError(
            f"{name} is called with cu_seq_lens_q = {bounds.tolist()}, and {reason}: pass bounds that begin at 0, end "
            f"with the last token and also fit the keys, or {LEAVE_OUT}"
        )
    if len(bounds) == 2 and shape[0] == 1:
        return None
    first = torch.zeros(shape[0] * shape[1], dtype=torch.bool, device=bounds.device)
    first[bounds[bounds < len(first)].long()] = True
    first = first.view(shape)
    if bool(first[:, 0].all()) and bool((first.sum(1) == 1).all()):
        return None
    return Packed.of_starts(first, _padding(first, bounds, now))


def _of_flash(positions: Tensor, now: Running) -> Packed | None:
    least = positions.min()
    consecutive = least + torch.arange(positions.shape[1], device=positions.device)
    if bool((positions == consecutive).all()):
        return None
    first = positions == least
    first[:, 0] = True
    if int(first.sum()) == 1:
        return None
    return Packed.of_starts(first, _padding(first, positions, now))


def _of_mask(positions: Tensor, mask: Any, shape: tuple[int, int], now: Running) -> Packed | None:
    first = torch.ones(shape, dtype=torch.bool, device=positions.device)
    first[:, 1:] = positions.diff(dim=1) != 1
    if int(first.sum()) == len(first):
        return None
    # Tokens that a mask hides from themselves are padding; a sequence begins behind it.
    seen = seeing_themselves(mask, shape[1])
    hidden = torch.zeros_like(first) if seen is None else ~seen.expand(shape)
    first[:, 1:] |= hidden[:, :-1]
    first &= ~hidden
    if bool((first.sum(1) <= 1).all()):
        return None
    packing = Packed.of_starts(first, hidden | _padding(first, positions, now))
    if packing is None or packing.allows_across(lambda rows, at: visible_at(mask, rows, at, shape[1])):
        return None
    return packing


def _padding(first: Tensor, told_by: Tensor, now: Running) -> Tensor:
    """Return which tokens belong to padding sequences, (B, T): the last ones of a row that hold the model's padding
    token alone, as collators append them to a row without a mask."""
    padding = paddings.get(told_by, now.padding)
    if padding is None or padding.shape != first.shape:
        return torch.zeros_like(first)
    last = padding.flip(1).cumprod(1).flip(1).bool()
    return (first & last).cumsum(1) > 0
