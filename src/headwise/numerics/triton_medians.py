"""The median of each row by radix selection: every pass counts the next eight bits of the numbers that are still left.

Numbers are compared as the unsigned integers that have their order. A program reads a part of a row; which numbers are
left, it finds from the counts of the passes before. torch's own median on CUDA reads a whole row by one block.
"""

# Triton interprets the annotations of a kernel itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# numbers of one program
PART = 8192
# leading bits of an fp32 number that can differ, rounded up to whole passes
PASSES = {torch.bfloat16: 2, torch.float16: 3, torch.float32: 4}


@triton.jit
def _found(counts_at, row, rank, PASSES: tl.constexpr, ALL: tl.constexpr):
    """Return the leading bits of the number of this rank, and its rank among those that share them."""
    digits = tl.arange(0, 256)
    leading = tl.zeros([], tl.uint32)
    for done in tl.static_range(PASSES):
        counts = tl.load(counts_at + (row * ALL + done) * 256 + digits)
        upto = tl.cumsum(counts, 0)
        before = upto <= rank
        leading = (leading << 8) | tl.sum(before.to(tl.int32), 0).to(tl.uint32)
        rank -= tl.sum(tl.where(before, counts, 0), 0)
    return leading, rank


@triton.jit
def count_kernel(
    x_at, center_at, counts_at, nans_at, COUNT, RANK,
    CENTERED: tl.constexpr, DONE: tl.constexpr, ALL: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Add up how often each value of the next eight bits occurs in a part of a row."""
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * PART + tl.arange(0, PART)
    here = place < COUNT
    x = tl.load(x_at + row * COUNT + place, mask=here, other=0.0).to(tl.float32)
    if CENTERED:
        x = tl.abs(x - tl.load(center_at + row))
    bits = x.to(tl.uint32, bitcast=True)
    bits = tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    if DONE == 0:
        tl.atomic_add(nans_at + row, tl.sum((here & (x != x)).to(tl.int32), 0))
    else:
        leading, _ = _found(counts_at, row, RANK, DONE, ALL)
        here = here & (bits >> (32 - 8 * DONE) == leading)
    counts = tl.histogram(((bits >> (24 - 8 * DONE)) & 255).to(tl.int32), 256, mask=here)
    at = counts_at + (row * ALL + DONE) * 256 + tl.arange(0, 256)
    tl.atomic_add(at, counts, mask=counts > 0)


@triton.jit
def median_kernel(out_at, counts_at, nans_at, RANK, ALL: tl.constexpr):
    """Write the number of a row that the counts leave; nan if the row has one."""
    row = tl.program_id(0).to(tl.int64)
    leading, _ = _found(counts_at, row, RANK, ALL, ALL)
    bits = leading << (32 - 8 * ALL)
    # The bits that were not counted are those of a number that was widened: 0, and inverted where it is negative.
    negative = (bits | ((1 << (32 - 8 * ALL)) - 1)) ^ 0xFFFFFFFF
    bits = tl.where(bits >> 31 == 1, bits ^ 0x80000000, negative)
    median = bits.to(tl.float32, bitcast=True)
    tl.store(out_at + row, tl.where(tl.load(nans_at + row) > 0, float("nan"), median))


def medians(x: Tensor, center: Tensor | None) -> Tensor:
    """Return the lower median of each row of x (R, N), or of |x - center| with center (R,), (R,) in fp32."""
    rows, count = x.shape
    passes = PASSES[torch.float32 if center is not None else x.dtype]
    counts = torch.zeros(rows, passes * 256 + 1, dtype=torch.int32, device=x.device).flatten()
    nans = counts[rows * passes * 256 :]
    out = torch.empty(rows, device=x.device, dtype=torch.float32)
    rank = (count - 1) // 2
    with torch.cuda.device_of(out):
        for done in range(passes):
            count_kernel[(triton.cdiv(count, PART), rows)](
                x, out if center is None else center, counts, nans, count, rank,
                CENTERED=center is not None, DONE=done, ALL=passes, PART=PART, num_warps=8,
            )  # fmt: skip
        median_kernel[(rows,)](out, counts, nans, rank, ALL=passes, num_warps=4)
    return out
