"""Layouts: the orders in which one matrix can store the rows of q, k and v."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """Heads and head sizes of a call: H query heads of size d, and G key and value heads of sizes d and e."""

    heads: int
    groups: int
    size: int
    value_size: int

    def of(self, kind: str) -> tuple[int, int]:
        """Return (heads, head size) of q, k or v."""
        return {"q": (self.heads, self.size), "k": (self.groups, self.size), "v": (self.groups, self.value_size)}[kind]

    def rows(self, kinds: str) -> int:
        """Return the total number of rows of the kinds."""
        return sum(heads * size for heads, size in map(self.of, kinds))


@dataclass(frozen=True)
class Layout:
    """A hypothesis: the layout in words, and the rows (heads, head size) of each kind."""

    words: str
    rows: dict[str, Tensor]


def layouts(kinds: str, sizes: Sizes) -> Iterator[Layout]:
    """Yield the layouts that one matrix for `kinds` can have, the usual ones first."""
    orders = sorted(itertools.permutations(kinds), key=lambda order: "".join(order) != kinds)
    for order in orders:
        yield _stacked(order, sizes)
    if len(kinds) > 1:
        for order in orders:
            yield _grouped(order, sizes)
    if len({sizes.of(kind) for kind in kinds}) == 1:
        for order in orders:
            yield from _transposed(order, sizes)


def _stacked(order: tuple[str, ...], sizes: Sizes) -> Layout:
    rows, start = {}, 0
    for kind in order:
        heads, size = sizes.of(kind)
        rows[kind] = torch.arange(start, start + heads * size).view(heads, size)
        start += heads * size
    equal = len({sizes.of(kind) for kind in order}) == 1
    words = f"stacked ({len(order)}, H, d)" if equal else "stacked, unequal blocks"
    return Layout(f"{words} as {', '.join(order)}" if len(order) > 1 else "separate", rows)


def _grouped(order: tuple[str, ...], sizes: Sizes) -> Layout:
    """Return the layout interleaved by key/value head: queries of its group, keys, values (GPT-NeoX, Falcon)."""
    per_group = {kind: sizes.of(kind)[0] // sizes.groups * sizes.of(kind)[1] for kind in order}
    width, offset, rows = sum(per_group.values()), 0, {}
    for kind in order:
        heads, size = sizes.of(kind)
        start = torch.arange(sizes.groups)[:, None] * width + offset
        rows[kind] = (start + torch.arange(per_group[kind])).reshape(heads, size)
        offset += per_group[kind]
    return Layout(f"interleaved by head (H, {len(order)}, d) as {', '.join(order)}", rows)


def _transposed(order: tuple[str, ...], sizes: Sizes) -> Iterator[Layout]:
    heads, size = sizes.of(order[0])
    extent = {"part": len(order), "head": heads, "dim": size}
    for axes in (("part", "dim", "head"), ("head", "dim", "part"), ("dim", "part", "head"), ("dim", "head", "part")):
        grid = torch.arange(len(order) * heads * size).view(*(extent[axis] for axis in axes))
        grid = grid.permute(axes.index("part"), axes.index("head"), axes.index("dim"))
        letters = ", ".join({"part": str(len(order)), "head": "H", "dim": "d"}[axis] for axis in axes)
        yield Layout(f"({letters}) as {', '.join(order)}", dict(zip(order, grid, strict=True)))


def as_rows(index: Tensor) -> slice | Tensor:
    """Return an index (heads, size) flattened head-major, as a slice if it is contiguous."""
    flat = index.reshape(-1)
    start = int(flat[0])
    if torch.equal(flat, torch.arange(start, start + flat.numel())):
        return slice(start, start + flat.numel())
    return flat.clone()
