"""The Triton kernel of `spectral_cuts`: one program cuts the singular values of one matrix, all matrices in one launch.

A program looks for singular values above the limit by a block of K random vectors, to which it applies a Chebyshev
polynomial of WᵀW that is at most 1 below the limit and grows fast above it. If the block has not grown, the program
leaves. Otherwise the block spans what is above: it is made orthonormal (Q), W is cut there, W ← W - WQ(1 - f)Qᵀ with
f = min(1, limit / σ) of the K × K matrix (WQ)ᵀWQ by Newton-Schulz iterations, and the program looks again, until it
finds nothing. Singular values far above the limit are cut down in several levels, as one filter does not tell the
directions of very different ones. No decision needs the host or another program. The filter multiplies in TF32, what
is cut is computed in three TF32 products.
"""

# Triton interprets the annotations of a kernel itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.attend.projections.chebyshev import BLOCK, QUICK, steps_of
from headwise.attend.projections.newton_schulz import cubics

# vectors of a block, tiles of rows and columns, and how many a program loads ahead
K, BR, BC, WARPS, STAGES = BLOCK, 64, 64, 8, 5
# Signs are told down to this share of the norm, and square roots inverted from this share on.
SIGNS, ROOTS = cubics(1e-5, 1e-7), cubics(5e-4, 1e-7)
# The level of a cut, relative to the largest singular value, where that is far above the limit.
LEVEL = 0.7
# A block in which fewer singular values are above the limit has met all of them.
FEW = 12.5
# A block whose vectors have grown more has lost its smaller directions to rounding.
GROWN = 1e4
# of 32-bit numbers a matrix
PLACES, NUMBERS = 6, 5


@triton.jit
def _multiply(
    w_at, stride, x_at, y_at, ROWS, COLUMNS,
    PRECISION: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write y = W·x (ROWS, K) for x (COLUMNS, K)."""
    k = tl.arange(0, K)
    for first in range(0, ROWS, BR):
        row = first + tl.arange(0, BR)
        sums = tl.zeros([BR, K], tl.float32)
        for start in range(0, COLUMNS, BC):
            column = start + tl.arange(0, BC)
            inside = (row[:, None] < ROWS) & (column[None, :] < COLUMNS)
            tile = tl.load(w_at + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0)
            x = tl.load(x_at + column[:, None] * K + k[None, :], mask=column[:, None] < COLUMNS, other=0.0)
            sums = tl.dot(tile.to(tl.float32), x, sums, input_precision=PRECISION)
        tl.store(y_at + row[:, None] * K + k[None, :], sums, mask=row[:, None] < ROWS)


@triton.jit
def _filtered(
    w_at, stride, y_at, now_at, next_at, edge, step, ROWS, COLUMNS,
    K: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the next Chebyshev block over the one before the last, from y = W·now; return its squared norms (K,)."""
    k = tl.arange(0, K)
    squares = tl.zeros([K], tl.float32)
    for first in range(0, COLUMNS, BR):
        column = first + tl.arange(0, BR)
        sums = tl.zeros([BR, K], tl.float32)
        for start in range(0, ROWS, BC):
            row = start + tl.arange(0, BC)
            inside = (row[:, None] < ROWS) & (column[None, :] < COLUMNS)
            tile = tl.load(w_at + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0)
            y = tl.load(y_at + row[:, None] * K + k[None, :], mask=row[:, None] < ROWS, other=0.0)
            sums = tl.dot(tl.trans(tile.to(tl.float32)), y, sums, input_precision="tf32")
        at, within = column[:, None] * K + k[None, :], column[:, None] < COLUMNS
        now = tl.load(now_at + at, mask=within, other=0.0)
        # Two divisions, as the square of a limit may leave the range.
        mapped = 2.0 * (sums / edge) / edge - now
        if step > 0:
            mapped = 2.0 * mapped - tl.load(next_at + at, mask=within, other=0.0)
        mapped = tl.where(within, mapped, 0.0)
        tl.store(next_at + at, mapped, mask=within)
        squares += tl.sum(mapped * mapped, 0)
    return squares


@triton.jit
def _gram(x_at, SIZE, K: tl.constexpr, BR: tl.constexpr):
    """Return xᵀx of x (SIZE, K)."""
    k = tl.arange(0, K)
    gram = tl.zeros([K, K], tl.float32)
    for first in range(0, SIZE, BR):
        row = first + tl.arange(0, BR)
        x = tl.load(x_at + row[:, None] * K + k[None, :], mask=row[:, None] < SIZE, other=0.0)
        gram = tl.dot(tl.trans(x), x, gram, input_precision="tf32x3")
    return gram


@triton.jit
def _times(x_at, matrix, SIZE, K: tl.constexpr, BR: tl.constexpr):
    """Write x ← x·matrix for x (SIZE, K)."""
    k = tl.arange(0, K)
    for first in range(0, SIZE, BR):
        row = first + tl.arange(0, BR)
        at, within = x_at + row[:, None] * K + k[None, :], row[:, None] < SIZE
        x = tl.load(at, mask=within, other=0.0)
        tl.store(at, tl.dot(x, matrix, input_precision="tf32x3"), mask=within)


@triton.jit
def _inverse_root(matrix, factors_at, COUNT: tl.constexpr, K: tl.constexpr):
    """Return the inverse square root of a positive matrix (K, K)."""
    one = tl.where(tl.arange(0, K)[:, None] == tl.arange(0, K)[None, :], 1.0, 0.0)
    norm = tl.sqrt(tl.sum(tl.sum(matrix * matrix, 1), 0))
    root, inverse = matrix / norm, one
    for i in range(COUNT):
        factor = tl.load(factors_at + i)
        product = tl.dot(inverse, root, input_precision="ieee")
        product = 1.5 * factor * one - 0.5 * factor * factor * factor * product
        root = tl.dot(root, product, input_precision="ieee")
        inverse = tl.dot(product, inverse, input_precision="ieee")
    return inverse / tl.sqrt(norm)


@triton.jit
def _sign(matrix, factors_at, COUNT: tl.constexpr):
    """Return the sign of a symmetric matrix (K, K)."""
    norm = tl.sqrt(tl.sum(tl.sum(matrix * matrix, 1), 0))
    sign = matrix / tl.maximum(norm, 1e-30)
    for i in range(COUNT):
        factor = tl.load(factors_at + i)
        square = tl.dot(sign, sign, input_precision="ieee")
        cube = tl.dot(sign, square, input_precision="ieee")
        sign = 1.5 * factor * sign - 0.5 * factor * factor * factor * cube
    return sign


@triton.jit
def _share_above(
    y_at, level, signs_at, roots_at, ROWS,
    SIGNS: tl.constexpr, ROOTS: tl.constexpr, K: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Return 1 - min(1, level / σ) of yᵀy (K, K), whose eigenvalues are the σ², and how many are above the level."""
    one = tl.where(tl.arange(0, K)[:, None] == tl.arange(0, K)[None, :], 1.0, 0.0)
    over = _gram(y_at, ROWS, K, BR) / level / level - one
    sign = _sign(over, signs_at, SIGNS)
    # What is below 0 becomes 0: (A + |A|) / 2, with |A| = A·sign(A).
    over = 0.5 * (over + tl.dot(over, sign, input_precision="ieee"))
    above = 0.5 * (K + tl.sum(tl.sum(sign * one, 1), 0))
    return one - _inverse_root(one + 0.5 * (over + tl.trans(over)), roots_at, ROOTS, K), above


@triton.jit
def _cut(
    w_at, stride, q_at, y_at, share, ROWS, COLUMNS, K: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Write W ← W - y·share·qᵀ."""
    k = tl.arange(0, K)
    for first in range(0, ROWS, BR):
        row = first + tl.arange(0, BR)
        y = tl.load(y_at + row[:, None] * K + k[None, :], mask=row[:, None] < ROWS, other=0.0)
        y = tl.dot(y, share, input_precision="tf32x3")
        for start in range(0, COLUMNS, BC):
            column = start + tl.arange(0, BC)
            inside = (row[:, None] < ROWS) & (column[None, :] < COLUMNS)
            at = w_at + row[:, None].to(tl.int64) * stride + column[None, :]
            q = tl.load(q_at + column[:, None] * K + k[None, :], mask=column[:, None] < COLUMNS, other=0.0)
            less = tl.dot(y, tl.trans(q), input_precision="tf32x3")
            tl.store(at, tl.load(at, mask=inside, other=0.0) - less, mask=inside)


@triton.jit
def _copy(from_at, from_stride, to_at, to_stride, ROWS, COLUMNS, BR: tl.constexpr, BC: tl.constexpr):
    """Copy a matrix from one dtype to another."""
    for first in range(0, ROWS, BR):
        row = first + tl.arange(0, BR)
        for start in range(0, COLUMNS, BC):
            column = start + tl.arange(0, BC)
            inside = (row[:, None] < ROWS) & (column[None, :] < COLUMNS)
            x = tl.load(from_at + row[:, None].to(tl.int64) * from_stride + column[None, :], mask=inside, other=0.0)
            at = to_at + row[:, None].to(tl.int64) * to_stride + column[None, :]
            tl.store(at, x.to(to_at.dtype.element_ty), mask=inside)


@triton.jit
def _seed(w_at, COLUMNS, WIDTH: tl.constexpr):
    """Return a number that differs whenever the first row of a matrix does."""
    column = tl.arange(0, WIDTH)
    x = tl.load(w_at + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    return tl.sum(x.to(tl.int32, bitcast=True).to(tl.int64) * (2 * column + 1), 0) & 0x7FFFFFFF


@triton.jit
def cap_kernel(
    weight_at, work_at, scratch_at, places_at, numbers_at, signs_at, roots_at, limit,
    FEW: tl.constexpr, QUICK: tl.constexpr, LEVEL: tl.constexpr, GROWN: tl.constexpr, NARROW: tl.constexpr,
    PLACES: tl.constexpr, NUMBERS: tl.constexpr, SIGNS: tl.constexpr, ROOTS: tl.constexpr,
    K: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Cut the singular values of a matrix at the limit, in place; NARROW: by way of a copy in fp32."""
    places_at += tl.program_id(0) * PLACES
    ROWS, COLUMNS = tl.load(places_at + 1).to(tl.int32), tl.load(places_at + 2).to(tl.int32)
    own_at, own_stride = weight_at + tl.load(places_at), tl.load(places_at + 3)
    w_at, stride = work_at + tl.load(places_at), own_stride
    if NARROW:
        w_at, stride = work_at + tl.load(places_at + 5), COLUMNS.to(tl.int64)
    even_at = scratch_at + tl.load(places_at + 4)
    odd_at = even_at + COLUMNS * K
    y_at = odd_at + COLUMNS * K
    numbers_at += tl.program_id(0) * NUMBERS
    quick_steps, steps = tl.load(numbers_at).to(tl.int32), tl.load(numbers_at + 1).to(tl.int32)
    quick_bound, bound = tl.load(numbers_at + 2), tl.load(numbers_at + 3)
    turns = tl.load(numbers_at + 4).to(tl.int32)
    grown = GROWN * tl.sqrt(COLUMNS.to(tl.float32))
    k = tl.arange(0, K)
    seed = _seed(own_at, COLUMNS, 128)

    quick, cuts, turn, level = 1, 0, 0, limit
    while turn < turns:
        for first in range(0, COLUMNS, BR):
            column = first + tl.arange(0, BR)
            at = column[:, None] * K + k[None, :]
            tl.store(even_at + at, tl.randn(seed + turn, at), mask=column[:, None] < COLUMNS)
        edge = level * tl.where(quick > 0, QUICK, 1.0)
        end, step = tl.where(quick > 0, quick_steps, steps), 0
        squares = tl.full([K], 1.0, tl.float32)
        growth, largest = 1.0, 0.0
        while (step < end) & (largest < grown):
            now_at = tl.where(step % 2 == 0, even_at, odd_at)
            next_at = tl.where(step % 2 == 0, odd_at, even_at)
            tl.debug_barrier()
            before = squares
            if NARROW and cuts == 0:
                _multiply(own_at, own_stride, now_at, y_at, ROWS, COLUMNS, "tf32", K, BR, BC)
                tl.debug_barrier()
                squares = _filtered(own_at, own_stride, y_at, now_at, next_at, edge, step, ROWS, COLUMNS, K, BR, BC)
            else:
                _multiply(w_at, stride, now_at, y_at, ROWS, COLUMNS, "tf32", K, BR, BC)
                tl.debug_barrier()
                squares = _filtered(w_at, stride, y_at, now_at, next_at, edge, step, ROWS, COLUMNS, K, BR, BC)
            growth = tl.sqrt(tl.max(squares / tl.maximum(before, 1e-30), 0))
            # of infinite numbers, which stop the filter, and of those that are not numbers, which end the program
            largest = tl.sqrt(tl.max(squares, 0))
            step += 1
        turn += 1
        x_at = tl.where(step % 2 == 0, even_at, odd_at)
        whole = (step == end) & (largest < grown)
        top = edge * tl.sqrt(((growth + 1.0 / growth) / 2 + 1) / 2)
        if (largest < tl.where(quick > 0, quick_bound, bound)) & whole & (level == limit):
            turn = turns
        elif quick > 0:
            quick = 0
        elif not (largest < 1e30):
            # A filter at a level far above tells infinite numbers from large ones.
            level *= 1e6
            if not (level < 1e25) | (largest == largest):
                turn = turns
        elif (step < 2) & (step < end):
            # One step says little about how far above.
            level *= 16.0
        elif (step < end) & (LEVEL * top > 1.1 * level):
            level = LEVEL * top
        else:
            if NARROW and cuts == 0:
                _copy(own_at, own_stride, w_at, stride, ROWS, COLUMNS, BR, BC)
            scale = 1.0 / tl.sqrt(tl.maximum(squares, 1e-30))
            one = tl.where(k[:, None] == k[None, :], 1.0, 0.0)
            tl.debug_barrier()
            _times(x_at, one * scale[None, :], COLUMNS, K, BR)
            for _ in range(3):
                tl.debug_barrier()
                gram = _gram(x_at, COLUMNS, K, BR)
                # Directions that rounding has taken are lifted to others.
                gram += one * (8e-6 * tl.sum(tl.sum(gram * one, 1), 0) / K)
                turned = _inverse_root(gram, roots_at, ROOTS, K)
                tl.debug_barrier()
                _times(x_at, turned, COLUMNS, K, BR)
            tl.debug_barrier()
            _multiply(w_at, stride, x_at, y_at, ROWS, COLUMNS, "tf32x3", K, BR, BC // 2)
            tl.debug_barrier()
            share, above = _share_above(y_at, level, signs_at, roots_at, ROWS, SIGNS, ROOTS, K, BR)
            tl.debug_barrier()
            _cut(w_at, stride, x_at, y_at, share, ROWS, COLUMNS, K, BR, BC // 2)
            cuts += 1
            if whole & (above < FEW) & (level == limit):
                # A block that has room left has met all that is far above.
                turn = turns
            level = limit
        tl.debug_barrier()
    if NARROW and cuts > 0:
        _copy(w_at, stride, own_at, own_stride, ROWS, COLUMNS, BR, BC)


def cap(matrices: Sequence[Tensor], limit: float) -> None:
    """Compute `cut_all_`: cut matrices of one dtype on one device, each with a second stride of 1, in place."""
    first = matrices[0]
    where = tuple((x.data_ptr() - first.data_ptr(), *x.shape, x.stride(0)) for x in matrices)
    places, numbers, scratch_size, work_size = _tables(where, first.element_size(), first.device)
    signs, roots = _factors(first.device)
    scratch = first.new_empty(scratch_size, dtype=torch.float32)
    narrow = first.dtype != torch.float32
    work = first.new_empty(work_size, dtype=torch.float32) if narrow else first
    with torch.cuda.device_of(first):
        cap_kernel[(len(matrices),)](
            first, work, scratch, places, numbers, signs, roots, limit,
            FEW=FEW, QUICK=QUICK, LEVEL=LEVEL, GROWN=GROWN, NARROW=narrow, PLACES=PLACES, NUMBERS=NUMBERS,
            SIGNS=len(SIGNS), ROOTS=len(ROOTS), K=K, BR=BR, BC=BC, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _tables(
    where: tuple[tuple[int, int, int, int], ...], size: int, device: torch.device
) -> tuple[Tensor, Tensor, int, int]:
    """Return where each matrix, its vectors and its copy lie, its filters, and the numbers of all vectors and copies.

    Cached, as a table that is made in a step would be copied to the device there.
    """
    places, numbers, vectors, copies = [], [], 0, 0
    for offset, rows, columns, stride in where:
        places.append((offset // size, rows, columns, stride, vectors, copies))
        # A cut takes K singular values of a level, and a level all of those above it.
        numbers.append((*steps_of(columns), 64 + 16 * triton.cdiv(min(rows, columns), K)))
        vectors += K * (rows + 2 * columns)
        copies += rows * columns
    table = torch.tensor(places, dtype=torch.int64, device=device)
    return table, torch.tensor(numbers, dtype=torch.float32, device=device), vectors, copies


@functools.lru_cache(maxsize=8)
def _factors(device: torch.device) -> tuple[Tensor, Tensor]:
    signs, roots = (torch.tensor(factors, dtype=torch.float32, device=device) for factors in (SIGNS, ROOTS))
    return signs, roots
