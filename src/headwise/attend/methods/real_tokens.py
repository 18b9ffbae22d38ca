"""The real queries and keys of a call and their numbers, by which penalties divide."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attend.core import Call


def whole_of(call: Call) -> Call:
    """Return the whole call that a block of queries belongs to, or the call itself if it is not a block."""
    return call if call.whole is None else call.whole


def real_keys(call: Call) -> Tensor | None:
    """Return which keys at least one query may see, bool (B|1, N), or None for all."""
    if call.packed is not None:
        return call.packed.real
    if call.mask is None:
        return None
    allowed = call.allowed()
    assert allowed is not None
    return allowed.any(2).any(1)


def key_counts(call: Call) -> Tensor:
    """Return the number of real keys of each sample, float (B|1,), at least 1."""
    return _count(real_keys(call), call.keys, call)


def query_counts(call: Call) -> Tensor:
    """Return the number of real queries of each sample in the whole call, float (B|1,), at least 1."""
    whole = whole_of(call)
    return _count(whole.real_queries(), whole.queries, call)


def _count(real: Tensor | None, size: int, call: Call) -> Tensor:
    # A mask that is the same for all queries does not distinguish them: then all count.
    if real is None or real.shape[-1] != size:
        return torch.full((1,), float(size), device=call.q.device, dtype=torch.float32)
    return real.sum(-1).clamp(min=1).float()


def only_real_rows(x: Tensor, call: Call) -> Tensor:
    """Return x (B, H, T, ...) with the rows of queries that are not real set to 0."""
    real = call.real_queries()
    return x if real is None else x.masked_fill(~real[:, None, :, None], 0.0)
