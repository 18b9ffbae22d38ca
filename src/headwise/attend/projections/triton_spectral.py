"""The Triton kernels of `spectral_group`: sigma and the scaled blocks of all weights, their gradients, an iteration.

A program has BR rows of one block (n, R, C), which it reads in tiles of BC columns in any strides. Sums over a block
are written as one number a program and added by the next kernel in a fixed order, so that the same numbers always have
the same bits, in a group or alone. All sums are in fp32.
"""

# Triton interprets the annotations of a kernel itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BR, BC = 32, 128


@triton.jit
def _tile(at, row, column, row_stride, column_stride, ROWS, COLUMNS):
    """Load a tile of a block in fp32; 0 beyond its rows and columns."""
    inside = (row[:, None] < ROWS) & (column[None, :] < COLUMNS)
    offset = row[:, None].to(tl.int64) * row_stride + column[None, :].to(tl.int64) * column_stride
    return tl.load(at + offset, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _sum_of(at, block, TILES, PADDED: tl.constexpr):
    """Return the sum of the numbers of a block's programs."""
    tile = tl.arange(0, PADDED)
    return tl.sum(tl.load(at + block * TILES + tile, mask=tile < TILES, other=0.0), 0)


@triton.jit
def sigma_kernel(
    stack_at, a_at, b_at, dot_at, square_at, norm_at, block_stride, row_stride, column_stride, ROWS, COLUMNS, TILES,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write aᵀ·S·b and ‖a‖² over the rows of a program, and ‖b‖² of its block."""
    tile, block = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tile * BR + tl.arange(0, BR)
    sums = tl.zeros([BR], tl.float32)
    square = tl.zeros([BC], tl.float32)
    for first in range(0, COLUMNS, BC):
        column = first + tl.arange(0, BC)
        b = tl.load(b_at + block * COLUMNS + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
        own = _tile(stack_at + block * block_stride, row, column, row_stride, column_stride, ROWS, COLUMNS)
        sums += tl.sum(own * b[None, :], 1)
        square += b * b
    a = tl.load(a_at + block * ROWS + row, mask=row < ROWS, other=0.0).to(tl.float32)
    tl.store(dot_at + block * TILES + tile, tl.sum(a * sums, 0))
    tl.store(square_at + block * TILES + tile, tl.sum(a * a, 0))
    if tile == 0:
        tl.store(norm_at + block, tl.sum(square, 0))


@triton.jit
def scale_kernel(
    stack_at, out_at, places_at, gamma_at, dot_at, square_at, b_square_at, sigma_at, norm_at,
    block_stride, row_stride, column_stride, ROWS, COLUMNS, TILES,
    LEARNED: tl.constexpr, PADDED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write gamma / sigma·S at each block's place, sigma and ‖a‖·‖b‖."""
    tile, block = tl.program_id(0), tl.program_id(1).to(tl.int64)
    norm = tl.sqrt(_sum_of(square_at, block, TILES, PADDED) * tl.load(b_square_at + block))
    sigma = _sum_of(dot_at, block, TILES, PADDED) / norm
    if tile == 0:
        tl.store(sigma_at + block, sigma)
        tl.store(norm_at + block, norm)
    ratio = 1.0 / sigma
    if LEARNED:
        ratio = tl.load(gamma_at + block).to(tl.float32) / sigma
    out_at += tl.load(places_at + 2 * block)
    out_stride = tl.load(places_at + 2 * block + 1)
    row = tile * BR + tl.arange(0, BR)
    for first in range(0, COLUMNS, BC):
        column = first + tl.arange(0, BC)
        own = _tile(stack_at + block * block_stride, row, column, row_stride, column_stride, ROWS, COLUMNS)
        inside = (row[:, None] < ROWS) & (column[None, :] < COLUMNS)
        tl.store(out_at + row[:, None].to(tl.int64) * out_stride + column[None, :], own * ratio, mask=inside)


@triton.jit
def inner_kernel(
    above_at, stack_at, dot_at, above_block, above_row, above_column, block_stride, row_stride, column_stride,
    ROWS, COLUMNS, TILES, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write ⟨G, S⟩ over the rows of a program."""
    tile, block = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tile * BR + tl.arange(0, BR)
    sums = tl.zeros([BR], tl.float32)
    for first in range(0, COLUMNS, BC):
        column = first + tl.arange(0, BC)
        own = _tile(stack_at + block * block_stride, row, column, row_stride, column_stride, ROWS, COLUMNS)
        above = _tile(above_at + block * above_block, row, column, above_row, above_column, ROWS, COLUMNS)
        sums += tl.sum(own * above, 1)
    tl.store(dot_at + block * TILES + tile, tl.sum(sums, 0))


@triton.jit
def slope_kernel(
    above_at, out_at, places_at, a_at, b_at, gamma_at, sigma_at, norm_at, dot_at, inner_at,
    above_block, above_row, above_column, ROWS, COLUMNS, TILES,
    LEARNED: tl.constexpr, PADDED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write gamma / sigma·(G - ⟨G, S⟩ / sigma·abᵀ) at each block's place, and ⟨G, S⟩ / sigma."""
    tile, block = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sigma = tl.load(sigma_at + block)
    inner = _sum_of(dot_at, block, TILES, PADDED) / sigma
    if tile == 0:
        tl.store(inner_at + block, inner)
    ratio = 1.0 / sigma
    if LEARNED:
        ratio = tl.load(gamma_at + block).to(tl.float32) / sigma
    out_at += tl.load(places_at + 2 * block)
    out_stride = tl.load(places_at + 2 * block + 1)
    row = tile * BR + tl.arange(0, BR)
    a = tl.load(a_at + block * ROWS + row, mask=row < ROWS, other=0.0).to(tl.float32)
    a *= inner / tl.load(norm_at + block)
    for first in range(0, COLUMNS, BC):
        column = first + tl.arange(0, BC)
        b = tl.load(b_at + block * COLUMNS + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
        above = _tile(above_at + block * above_block, row, column, above_row, above_column, ROWS, COLUMNS)
        inside = (row[:, None] < ROWS) & (column[None, :] < COLUMNS)
        slope = ratio * (above - a[:, None] * b[None, :])
        tl.store(out_at + row[:, None].to(tl.int64) * out_stride + column[None, :], slope, mask=inside)


@triton.jit
def product_kernel(
    stack_at, x_at, x_square_at, y_at, square_at, block_stride, row_stride, column_stride, ROWS, COLUMNS, TILES,
    X_TILES, UNIT: tl.constexpr, X_PADDED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write y = S·x and ‖y‖² over the rows of a program; with UNIT, of x / ‖x‖."""
    tile, block = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tile * BR + tl.arange(0, BR)
    sums = tl.zeros([BR], tl.float32)
    for first in range(0, COLUMNS, BC):
        column = first + tl.arange(0, BC)
        x = tl.load(x_at + block * COLUMNS + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
        own = _tile(stack_at + block * block_stride, row, column, row_stride, column_stride, ROWS, COLUMNS)
        sums += tl.sum(own * x[None, :], 1)
    if UNIT:
        sums /= tl.maximum(tl.sqrt(_sum_of(x_square_at, block, X_TILES, X_PADDED)), 1e-12)
    tl.store(y_at + block * ROWS + row, sums, mask=row < ROWS)
    tl.store(square_at + block * TILES + tile, tl.sum(sums * sums, 0))


@triton.jit
def unit_kernel(
    x_at, square_at, out_at, SIZE, TILES, y_at, y_square_at, y_out_at, Y_SIZE, Y_TILES,
    PADDED: tl.constexpr, Y_PADDED: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write x / ‖x‖ and y / ‖y‖ of a block."""
    block = tl.program_id(0).to(tl.int64)
    norm = tl.maximum(tl.sqrt(_sum_of(square_at, block, TILES, PADDED)), 1e-12)
    for first in range(0, SIZE, BC):
        at = first + tl.arange(0, BC)
        x = tl.load(x_at + block * SIZE + at, mask=at < SIZE, other=0.0)
        tl.store(out_at + block * SIZE + at, x / norm, mask=at < SIZE)
    norm = tl.maximum(tl.sqrt(_sum_of(y_square_at, block, Y_TILES, Y_PADDED)), 1e-12)
    for first in range(0, Y_SIZE, BC):
        at = first + tl.arange(0, BC)
        y = tl.load(y_at + block * Y_SIZE + at, mask=at < Y_SIZE, other=0.0)
        tl.store(y_out_at + block * Y_SIZE + at, y / norm, mask=at < Y_SIZE)


def scale(
    stack: Tensor, a: Tensor, b: Tensor, gamma: Tensor | None, axis: int, counts: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `spectral_scale`."""
    n, rows, columns = stack.shape
    tiles = triton.cdiv(rows, BR)
    dots, squares = stack.new_empty(2, n, tiles, dtype=torch.float32)
    b_square, sigma, norm = (stack.new_empty(n, dtype=torch.float32) for _ in range(3))
    out = stack.new_empty(stack.numel())
    a, b, grid = a.contiguous(), b.contiguous(), (tiles, n)
    with torch.cuda.device_of(stack):
        sigma_kernel[grid](stack, a, b, dots, squares, b_square, *stack.stride(), rows, columns, tiles, BR=BR, BC=BC)
        scale_kernel[grid](
            stack, out, _places(stack.shape, axis, tuple(counts), stack.device), sigma if gamma is None else gamma,
            dots, squares, b_square, sigma, norm, *stack.stride(), rows, columns, tiles,
            LEARNED=gamma is not None, PADDED=triton.next_power_of_2(tiles), BR=BR, BC=BC,
        )  # fmt: skip
    return out, sigma, norm


def slopes(
    above: Tensor, stack: Tensor, a: Tensor, b: Tensor, gamma: Tensor | None, sigma: Tensor, norm: Tensor,
    axis: int, counts: list[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `spectral_slopes`."""
    n, rows, columns = stack.shape
    tiles = triton.cdiv(rows, BR)
    dots, inner = stack.new_empty(n, tiles, dtype=torch.float32), torch.empty_like(sigma)
    out = stack.new_empty(stack.numel())
    a, b, grid = a.contiguous(), b.contiguous(), (tiles, n)
    with torch.cuda.device_of(stack):
        inner_kernel[grid](above, stack, dots, *above.stride(), *stack.stride(), rows, columns, tiles, BR=BR, BC=BC)
        slope_kernel[grid](
            above, out, _places(stack.shape, axis, tuple(counts), stack.device), a, b,
            sigma if gamma is None else gamma, sigma, norm, dots, inner, *above.stride(), rows, columns, tiles,
            LEARNED=gamma is not None, PADDED=triton.next_power_of_2(tiles), BR=BR, BC=BC,
        )  # fmt: skip
    return out, inner


def iteration(stack: Tensor, start: Tensor, flipped: bool) -> tuple[Tensor, Tensor]:
    """Compute `power_iteration`."""
    matrix = stack.mT if flipped else stack
    n, rows, columns = matrix.shape
    tiles, other = triton.cdiv(rows, BR), triton.cdiv(columns, BR)
    new: Any = functools.partial(stack.new_empty, dtype=torch.float32)
    y, squares, x, x_squares = new(n, rows), new(n, tiles), new(n, columns), new(n, other)
    left, right = start.new_empty(n, rows), start.new_empty(n, columns)
    padded, x_padded = triton.next_power_of_2(tiles), triton.next_power_of_2(other)
    start = start.contiguous()
    with torch.cuda.device_of(stack):
        product_kernel[(tiles, n)](
            matrix, start, squares, y, squares, *matrix.stride(), rows, columns, tiles, tiles,
            UNIT=False, X_PADDED=padded, BR=BR, BC=BC,
        )  # fmt: skip
        matrix = matrix.mT
        product_kernel[(other, n)](
            matrix, y, squares, x, x_squares, *matrix.stride(), columns, rows, other, tiles,
            UNIT=True, X_PADDED=padded, BR=BR, BC=BC,
        )  # fmt: skip
        unit_kernel[(n,)](
            y, squares, left, rows, tiles, x, x_squares, right, columns, other,
            PADDED=padded, Y_PADDED=x_padded, BC=BC,
        )  # fmt: skip
    return (right, left) if flipped else (left, right)


@functools.lru_cache(maxsize=64)
def _places(shape: torch.Size, axis: int, counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return for each block (n, 2) where its weight has its first element, and how far apart its rows are there."""
    _, rows, columns = shape
    places, first = [], 0
    for count in counts:
        step, stride = (rows * columns, columns) if axis == 0 else (columns, count * columns)
        places += [(first + at * step, stride) for at in range(count)]
        first += count * rows * columns
    return torch.tensor(places, dtype=torch.int64, device=device)
