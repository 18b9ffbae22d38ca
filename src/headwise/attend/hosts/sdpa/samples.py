"""Determine which rows of a site's calls belong to which sample, by changing one sample of an example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.attend.hosts.layers.declared import Candidate
from headwise.attend.hosts.sdpa.adapter import SdpaAdapter
from headwise.attend.hosts.sdpa.shape import FOLDED, OWN, SAMPLE_MAJOR, UNCLEAR, WINDOW_MAJOR
from headwise.borders import tree_leaves, tree_map

Calls = list[tuple[Tensor, Tensor, Tensor, int]]
# Relative to a tensor's largest entry: above the rounding of rows that did not change, far below the change of a
# changed sample's rows.
TOLERANCE = 1e-5


def run_and_learn(candidates: list[Candidate], example: Any, run: Callable[[Any], Any]) -> None:
    """Run the model on an example and, if rows are not samples, again with one sample changed.

    The adapters must be attached; the results are written to `seen` of their fitted layers.
    """
    adapters = [f.adapter for f in candidates if isinstance(f.adapter, SdpaAdapter)]
    base = _record(adapters, example, run)
    for adapter, calls in base.items():
        if not adapter.site.is_cross and any(q.shape[-2] != k.shape[-2] for q, k, _, _ in calls):
            _seen(adapter)["pooled"] = True
    batch = next((x.shape[0] for x in tree_leaves(example) if isinstance(x, Tensor) and x.dim() > 0), None)
    odd = [a for a in base if batch is not None and any(_odd(a, call[0], batch) for call in base[a])]
    if not odd or batch is None:
        return
    first = _record(adapters, _changed(example, 0), run) if batch > 1 else {}
    second: dict[SdpaAdapter, Calls] | None = None
    for adapter in odd:
        rows = _pattern(adapter, base[adapter], first.get(adapter, []), batch)
        if rows == UNCLEAR and batch > 1:
            # The batch may be the second dimension, as in models that take (T, B, C).
            second = second if second is not None else _record(adapters, _changed(example, 1), run)
            moved = _moved(base[adapter], second.get(adapter, []))
            rows = OWN if moved and sum(map(len, moved)) == 1 else UNCLEAR
        _write(adapter, base[adapter], rows, batch)


def _record(adapters: list[SdpaAdapter], example: Any, run: Callable[[Any], Any]) -> dict[SdpaAdapter, Calls]:
    for adapter in adapters:
        adapter.record = []
    try:
        run(example)
        return {adapter: adapter.record for adapter in adapters if adapter.record}
    finally:
        for adapter in adapters:
            adapter.record = None


def _odd(adapter: SdpaAdapter, q: Tensor, batch: int) -> bool:
    return q.dim() > 4 or q.shape[0] != batch or (q.dim() == 3 and (adapter.heads or 1) > 1)


def _changed(example: Any, dim: int) -> Any:
    """Return the example with its first sample changed, in all tensors with the batch size along `dim`."""
    tensors = [x for x in tree_leaves(example) if isinstance(x, Tensor) and x.dim() > dim]
    size = tensors[0].shape[dim] if tensors else 0

    def change(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() <= dim or x.shape[dim] != size or size < 2:
            return x
        other = x.clone()
        first = other.select(dim, 0)
        if x.is_floating_point():
            first.add_(torch.randn(first.shape, generator=torch.Generator().manual_seed(0)).to(first))
        else:
            first.copy_(x.select(dim, 1))
        return other

    return tree_map(change, example)


def _moved(base: Calls, other: Calls) -> list[set[int]]:
    """Return for each call the rows of q, k or v that differ between two runs; [] if the shapes differ."""
    if len(base) != len(other) or any(a.shape != b.shape for x, y in zip(base, other) for a, b in zip(x[:3], y[:3])):
        return []
    same = [[(a, b) for a, b in zip(x[:3], y[:3]) if a.shape[0] == x[0].shape[0]] for x, y in zip(base, other)]
    return [set().union(*(_differing(a, b) for a, b in pairs)) for pairs in same]


def _differing(a: Tensor, b: Tensor) -> set[int]:
    size = a.abs().nan_to_num(0.0, 0.0, 0.0).amax().clamp(min=1e-12)
    far = (a - b).abs().nan_to_num(0.0, 0.0, 0.0) > TOLERANCE * size
    return set(far.flatten(1).any(1).nonzero().flatten().tolist())


def _pattern(adapter: SdpaAdapter, base: Calls, other: Calls, batch: int) -> str:
    q, moved = base[0][0], _moved(base, other)
    if not moved:
        return UNCLEAR
    if q.dim() > 4:
        return SAMPLE_MAJOR if all(m == {0} for m in moved) and q.shape[0] == batch else UNCLEAR
    if sum(map(len, moved)) == 1:
        return OWN
    count = len(moved[0])
    if any(m != moved[0] for m in moved) or count < 2 or q.shape[0] != count * batch:
        return UNCLEAR
    if q.dim() == 3 and (adapter.heads or 1) > 1:
        # There are (rows that enter) x heads rows; with heads outermost, a sample's rows would not be adjacent.
        folded = q.shape[0] == base[0][3] * (adapter.heads or 1)
        return FOLDED if folded and moved[0] == set(range(count)) else UNCLEAR
    if moved[0] == set(range(count)):
        return SAMPLE_MAJOR
    return WINDOW_MAJOR if moved[0] == set(range(0, q.shape[0], batch)) else UNCLEAR


def _write(adapter: SdpaAdapter, base: Calls, rows: str, batch: int) -> None:
    seen = _seen(adapter)
    seen["row_order"] = rows
    q, entered = base[0][0], base[0][3]
    if q.dim() > 4 or rows in (SAMPLE_MAJOR, WINDOW_MAJOR) or (rows == FOLDED and entered != batch):
        seen["windowed"] = True
    if rows == OWN and q.dim() < 4:
        seen["heads"] = seen["kv_heads"] = 1


def _seen(adapter: SdpaAdapter) -> dict[str, Any]:
    assert adapter.fitted is not None
    return adapter.fitted.seen
