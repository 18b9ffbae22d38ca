"""The Triton kernels of `weight_rows`: rows gain·v / ‖v‖ of all weights, and their gradients.

A program has up to BR rows of one weight, in any strides, and reads them in tiles of BC inputs twice: for sums, then to
write. It knows nothing of other weights, so that a weight has the same bits in a group and alone. Sums are in fp32.
"""

# Triton interprets the annotations of a kernel itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows that lie together are few, so that the second reading finds them in the cache; columns fill a sector of memory.
ROWS, BC = {0: 8, 1: 32}, 128


@triton.jit
def _own(at, row, column, inside, row_stride, column_stride):
    offset = row[:, None].to(tl.int64) * row_stride + column[None, :].to(tl.int64) * column_stride
    return tl.load(at + offset, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _written(out, count, local, column, COLUMNS, AXIS: tl.constexpr):
    """Return where the elements of a program's rows are written, in a weight with `count` rows."""
    row, column = local[:, None].to(tl.int64), column[None, :].to(tl.int64)
    if AXIS == 0:
        offset = row * COLUMNS + column
    else:
        offset = row + column * count
    return out + offset


@triton.jit
def scaled_kernel(
    stack_at, gain_at, out_at, places_at, row_stride, column_stride, COLUMNS,
    AXIS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write gain·v / ‖v‖."""
    program = tl.program_id(0)
    local = tl.arange(0, BR)
    known = local < tl.load(places_at + 4 * program + 1)
    row = tl.load(places_at + 4 * program) + local
    squares = tl.zeros([BR], tl.float32)
    for first in range(0, COLUMNS, BC):
        column = first + tl.arange(0, BC)
        inside = known[:, None] & (column[None, :] < COLUMNS)
        own = _own(stack_at, row, column, inside, row_stride, column_stride)
        squares += tl.sum(own * own, 1)
    ratio = tl.load(gain_at + row, mask=known, other=0.0).to(tl.float32) / tl.sqrt(squares)
    out, count = tl.load(places_at + 4 * program + 2), tl.load(places_at + 4 * program + 3)
    for first in range(0, COLUMNS, BC):
        column = first + tl.arange(0, BC)
        inside = known[:, None] & (column[None, :] < COLUMNS)
        own = _own(stack_at, row, column, inside, row_stride, column_stride)
        tl.store(out_at + _written(out, count, local, column, COLUMNS, AXIS), own * ratio[:, None], mask=inside)


@triton.jit
def slopes_kernel(
    above_at, stack_at, gain_at, out_at, slope_at, places_at, above_row, above_column, row_stride, column_stride,
    COLUMNS, AXIS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write gain / ‖v‖·(G - ⟨G, v⟩ / ‖v‖²·v), and ⟨G, v⟩ / ‖v‖."""
    program = tl.program_id(0)
    local = tl.arange(0, BR)
    known = local < tl.load(places_at + 4 * program + 1)
    row = tl.load(places_at + 4 * program) + local
    squares = tl.zeros([BR], tl.float32)
    inner = tl.zeros([BR], tl.float32)
    for first in range(0, COLUMNS, BC):
        column = first + tl.arange(0, BC)
        inside = known[:, None] & (column[None, :] < COLUMNS)
        own = _own(stack_at, row, column, inside, row_stride, column_stride)
        squares += tl.sum(own * own, 1)
        inner += tl.sum(own * _own(above_at, row, column, inside, above_row, above_column), 1)
    norm = tl.sqrt(squares)
    inner /= norm
    tl.store(slope_at + row, inner, mask=known)
    ratio = tl.load(gain_at + row, mask=known, other=0.0).to(tl.float32) / norm
    inner /= norm
    out, count = tl.load(places_at + 4 * program + 2), tl.load(places_at + 4 * program + 3)
    for first in range(0, COLUMNS, BC):
        column = first + tl.arange(0, BC)
        inside = known[:, None] & (column[None, :] < COLUMNS)
        own = _own(stack_at, row, column, inside, row_stride, column_stride)
        above = _own(above_at, row, column, inside, above_row, above_column)
        slope = ratio[:, None] * (above - inner[:, None] * own)
        tl.store(out_at + _written(out, count, local, column, COLUMNS, AXIS), slope, mask=inside)


def scaled(stack: Tensor, gain: Tensor, axis: int, counts: list[int]) -> Tensor:
    """Compute `scaled_rows`."""
    out, columns = stack.new_empty(stack.numel()), stack.shape[1]
    places = _places(columns, axis, tuple(counts), stack.device)
    with torch.cuda.device_of(stack):
        scaled_kernel[(len(places),)](
            stack, gain.contiguous(), out, places, *stack.stride(), columns, AXIS=axis, BR=ROWS[axis], BC=BC
        )
    return out


def slopes(above: Tensor, stack: Tensor, gain: Tensor, axis: int, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Compute `row_slopes`."""
    out, columns, gain = stack.new_empty(stack.numel()), stack.shape[1], gain.contiguous()
    slope, places = torch.empty_like(gain), _places(columns, axis, tuple(counts), stack.device)
    with torch.cuda.device_of(stack):
        slopes_kernel[(len(places),)](
            above, stack, gain, out, slope, places, *above.stride(), *stack.stride(), columns,
            AXIS=axis, BR=ROWS[axis], BC=BC,
        )  # fmt: skip
    return out, slope


@functools.lru_cache(maxsize=64)
def _places(columns: int, axis: int, counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return for each program (n, 4) its first row, how many it has, where it writes, and the rows of its weight."""
    places, first = [], 0
    for count in counts:
        for row in range(0, count, ROWS[axis]):
            written = (first + row) * columns if axis == 0 else first * columns + row
            places.append((first + row, min(ROWS[axis], count - row), written, count))
        first += count
    return torch.tensor(places, dtype=torch.int64, device=device)
