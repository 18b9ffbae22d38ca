"""Queries drawn in strata, from which penalties estimate their sums over all queries."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attend.core import Call, Method
from headwise.attend.methods.real_tokens import whole_of


def check_rows(method: Method, number: object, least: int = 1, name: str = "rows") -> None:
    """Raise ValueError unless the setting `name` is None or a whole number from `least`."""
    whole = isinstance(number, int) and not isinstance(number, bool) and number >= least
    method.require(number is None or whole, f"{name} must be a whole number from {least}, or None, got {number!r}")


def drawn_rows(method: Method, rows: int, call: Call) -> tuple[Tensor, Tensor]:
    """Return the positions of the queries to read (B, n), and how many real queries each one stands for, in fp32.

    n is `rows`, or the number of queries if there are fewer; the second result is (B, n), or (n,) if all queries are
    real. Of a causal call, the first quarter of n are the first real queries: their rows differ most, because each sees
    another number of keys. The other real queries are cut into equal strata with one drawn in each, so that neighbours,
    whose rows are alike, are not drawn together. Each query counts once on average.
    """
    number, last = min(rows, call.queries), call.queries - 1
    first = number // 4 if call.causal else 0
    drawn = call.per_sample(call.uniform_draw(method, (call.samples, number)))
    real = call.real_queries()
    if real is None:
        times = torch.full(
            (number,), (call.queries - first) / (number - first), device=drawn.device, dtype=torch.float32
        )
        if first:
            times[:first] = 1.0
        return torch.addcmul(times.cumsum(0) - times, drawn, times).long().clamp(max=last), times
    real = real.expand(call.batch, call.queries)
    counts, index = real.sum(1, keepdim=True), torch.arange(number, device=drawn.device)
    times = torch.where(index < first, 1.0, (counts - first) / (number - first))
    ranks = torch.addcmul(times.cumsum(1) - times, drawn, times).long().minimum(counts - 1)
    # A sample with fewer real queries than rows is read whole.
    few = counts <= number
    ranks, times = torch.where(few, index, ranks), torch.where(few, (index < counts).float(), times)
    return torch.searchsorted(real.cumsum(1), ranks, right=True).clamp(max=last), times


def drawn_times(method: Method, rows: int, call: Call) -> Tensor:
    """Return how many real queries each query of a call or block stands for, fp32 (B, t): 0 if it is not drawn."""
    whole = whole_of(call)
    positions, times = drawn_rows(method, rows, whole)
    every = torch.zeros(whole.batch, whole.queries, device=times.device, dtype=torch.float32)
    every = every.scatter_add(1, positions, times.expand(positions.shape))
    return every if call.query_block is None else every[:, call.query_block]
