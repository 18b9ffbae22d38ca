"""Which keys a draw leaves: by column or element, in windows, and never none of a query's allowed keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.methods.real_tokens import whole_of

if TYPE_CHECKING:
    from headwise.core.call import Call
    from headwise.core.method import Method


def kept_keys(method: Method, call: Call, p: Tensor, unit: str, window: int = 1) -> Tensor:
    """Draw which keys stay.

    A query that would lose every key it may see gets the first of them back; in columns it comes back for all queries,
    so that the draw stays a mask of columns. Under causality this means that column 0 is never dropped.

    Args:
        method: whose draw it is.
        call: the call, or a block of it: a block sees its part of the whole draw.
        p: 0-d, the probability that a unit is dropped; with a window, that the drop of one starts `p / window`.
        unit: "column" drops a key for all queries of a head, "element" for each query apart.
        window: so many neighbouring keys are dropped together.

    Returns:
        bool, True for keys that stay: (B, H, 1, N) for columns, (B, H, T, N) for elements.
    """
    whole = whole_of(call)
    if unit == "column":
        draw = call.uniform_draw(method, (call.samples, call.heads, 1, call.keys))
        return _with_columns_back(_outside_windows(call.per_sample(draw) < p / window, window), whole)
    shape = (call.samples, call.heads, whole.queries, call.keys)
    draw = call.uniform_draw(method, shape, query_dim=2)
    return _with_elements_back(_outside_windows(call.per_sample(draw) < p / window, window), call)


def _outside_windows(starts: Tensor, window: int) -> Tensor:
    if window == 1:
        return ~starts
    # A key falls where one of the last `window` keys starts a fall: where the count has grown within the window.
    count = starts.cumsum(-1)
    before = torch.nn.functional.pad(count, (window, 0))[..., : count.shape[-1]]
    return count == before


def _with_columns_back(keep: Tensor, call: Call) -> Tensor:
    if call.mask is None:
        first = torch.arange(call.keys, device=keep.device) == 0
        # Under causality the first query sees column 0 alone, so that this column always comes back.
        return keep | (first if call.causal else first & ~keep.any(-1, keepdim=True))
    allowed = call.allowed()
    assert allowed is not None
    # How many of a query's keys stay, for all queries and heads by one product: no (B, H, T, N) tensor.
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
