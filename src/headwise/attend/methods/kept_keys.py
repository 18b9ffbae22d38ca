"""The keys that DropKey and DropAttention keep: by column or element, in windows, at least one for each query."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attend.core import Call, Method
from headwise.attend.methods.real_tokens import whole_of


def kept_keys(method: Method, call: Call, p: Tensor, unit: str, window: int = 1) -> Tensor:
    """Return a random choice of the keys that stay.

    A query that would lose all keys it may see gets the first of them back. With columns that key comes back for all
    queries of the head, so that the mask still consists of columns; under causality column 0 is never dropped.

    Args:
        p: probability that a unit is dropped, 0-d; a window of dropped keys starts with probability `p / window`.
        unit: "column" drops a key for all queries of a head, "element" for each query separately.
        window: number of neighbouring keys that are dropped together.

    Returns:
        bool, True for keys that stay: (B, H, 1, N) for columns, (B, H, T, N) for elements.
    """
    whole = whole_of(call)
    p = p if window == 1 else p / window
    if unit == "column":
        kept = call.kept_draw(method, (call.samples, call.heads, 1, call.keys), p)
        return _with_columns_back(_outside_windows(call.per_sample(kept), window), whole)
    shape = (call.samples, call.heads, whole.queries, call.keys)
    draw = call.uniform_draw(method, shape, query_dim=2)
    return _with_elements_back(_outside_windows(call.per_sample(draw) >= p, window), call)


def _outside_windows(none_starts: Tensor, window: int) -> Tensor:
    """Return which keys no dropped window covers, given the keys at which none starts."""
    if window == 1:
        return none_starts
    # A key is dropped if a window starts at one of the last `window` keys, i.e. if the count has grown since then.
    count = (~none_starts).cumsum(-1)
    before = torch.nn.functional.pad(count, (window, 0))[..., : count.shape[-1]]
    return count == before


def _with_columns_back(keep: Tensor, call: Call) -> Tensor:
    if call.mask is None:
        first = torch.arange(call.keys, device=keep.device) == 0
        # Under causality the first query sees only column 0, which therefore always comes back.
        return keep | (first if call.causal else first & ~keep.any(-1, keepdim=True))
    allowed = call.allowed()
    assert allowed is not None
    # The number of keys left to each query, by one product without a (B, H, T, N) tensor.
    if allowed.shape[1] == 1:
        left = (allowed[:, 0].float() @ keep[:, :, 0].float().mT).mT
    else:
        left = (allowed.float() @ keep.float().mT)[..., 0]
    lost = (left == 0) & allowed.any(-1)
    first = allowed.to(torch.uint8).argmax(-1).expand(lost.shape)
    back = torch.zeros(keep.shape[0], keep.shape[1], call.keys, dtype=torch.int32, device=keep.device)
    return keep | (back.scatter_add(2, first, lost.int()) > 0).unsqueeze(2)


def _with_elements_back(keep: Tensor, call: Call) -> Tensor:
    allowed = call.allowed()
    if allowed is None:
        first = torch.arange(call.keys, device=keep.device) == 0
        return keep | (first & ~keep.any(-1, keepdim=True))
    first = allowed & (allowed.cumsum(-1) == 1)
    return keep | (first & ~(keep & allowed).any(-1, keepdim=True))
