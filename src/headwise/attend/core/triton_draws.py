"""The draws of `random_draws` as one Triton kernel: the same bits, hashed in uint32 registers.

The number at position i of a draw is hash(hash(i·GOLDEN + key) + salt) with the finalizer of MurmurHash3, modulo 2^32.
Its upper 24 bits are a uniform number u of [0, 1). A normal number is √(-2 log(1 - u))·cos(2π u') with u' drawn at the
same position under another salt (Box and Muller 1958). An element of a matrix has the hash of its row, and one round
more (`random_draws.elements`).
"""

# Triton interprets the annotations of a kernel itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def scramble(h):
    """Return the finalizer of MurmurHash3 of uint32 numbers, the `_scramble` of `random_draws`."""
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def hashed(position, key, salt):
    """Return the 32-bit hashes of positions under a key and a salt, all uint32."""
    return scramble(scramble(position * 0x9E3779B1 + key) + salt)


@triton.jit
def uniform_at(position, key, salt):
    """Return fp32 numbers of [0, 1): the upper 24 bits of the hashes, which fp32 represents exactly."""
    # By way of int32, from which the conversion is one instruction.
    return (hashed(position, key, salt) >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def normal_at(position, key, salt):
    """Return fp32 numbers of N(0, 1)."""
    # 1 - u is exact, and at least 2^-24.
    radius = tl.sqrt(-2.0 * tl.log(1.0 - uniform_at(position, key, salt)))
    return radius * _cosine(uniform_at(position, key, salt ^ 0x5BD1E995))


@triton.jit
def _cosine(turns):
    """Return cos(2π·turns) for turns of [0, 1), to 1e-7; CUDA's own is ready for numbers that need a stack."""
    # cos(2πt) = sin(x) with x = 2π(|t - 1/2| - 1/4) of [-π/2, π/2], by the Taylor series up to x^11.
    x = (tl.abs(turns - 0.5) - 0.25) * 6.283185307179586
    y = x * x
    series = y * (2.7557319e-06 - y * 2.5052108e-08)
    return x * (1.0 - y * (0.16666667 - y * (0.0083333333 - y * (0.00019841270 - series))))


@triton.jit
def key_of(key_at, number, KEYED: tl.constexpr):
    """Return the key as uint32: read from the device, or the number that the host gave."""
    return tl.load(key_at).to(tl.uint32) if KEYED else number.to(tl.uint32, bitcast=True)


@triton.jit
def element_hash(row_hash, column):
    """Return the int32 hashes of elements, for the uint32 hashes of their rows and int32 columns, broadcast."""
    x = (row_hash ^ (column.to(tl.uint32) * 0x9E3779B1)) * 0x7FEB352D
    x = x.to(tl.int32, bitcast=True)
    # The shift of int32 keeps the sign, as in PyTorch, which has no other on a CPU.
    x = (x ^ (x >> 15)).to(tl.uint32, bitcast=True)
    return (x * 0x846CA68B).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["number", "salt", "first"])
def draw_kernel(
    out_at, key_at, number, salt, p, first, TAKEN, WIDTH, ROWS, COUNT,
    KIND: tl.constexpr, KEYED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one block of numbers.

    KIND is 0 for uniform numbers, 1 for normal ones, 2 for whether a uniform number is at least p, 3 for the elements
    of TAKEN of ROWS rows of each matrix, from row `first` on, and 4 for 1 / (1 - p) or 0 by the same question as 2.
    """
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key, salt = key_of(key_at, number, KEYED), salt.to(tl.uint32, bitcast=True)
    if KIND == 3:
        row = entry // WIDTH
        column = (entry - row * WIDTH).to(tl.int32)
        row = (row // TAKEN) * ROWS + first + row % TAKEN
        x = element_hash(hashed(row.to(tl.uint32), key, salt), column)
        drawn = ((x >> 8) + 8388608).to(tl.float32) * 5.9604644775390625e-08
    elif KIND == 1:
        drawn = normal_at(entry.to(tl.uint32), key, salt)
    else:
        drawn = uniform_at(entry.to(tl.uint32), key, salt)
    if KIND == 2:
        drawn = drawn >= p
    if KIND == 4:
        drawn = tl.where(drawn >= p, tl.div_rn(1.0, 1.0 - p), 0.0)
    tl.store(out_at + entry, drawn, mask=entry < COUNT)


def draw(
    kind: int, key: Tensor | None, number: int, salt: int, p: float, shape: list[int], rows: list[int], out: Tensor
) -> Tensor:
    """Fill `out` with the draw of `random_draws.draw_on_device` and return it."""
    count = out.numel()
    if count == 0:
        return out
    matrix = (rows[0], rows[1] - rows[0], shape[-1], shape[-2]) if rows else (0, 1, 1, 1)
    # Triton launches on the current device, which differs from that of `out` in a model spread over several devices.
    with torch.cuda.device_of(out):
        draw_kernel[(triton.cdiv(count, BLOCK),)](
            out.view(torch.uint8) if out.dtype == torch.bool else out,
            out if key is None else key,
            signed(number), signed(salt), p, *matrix, count,
            KIND=kind, KEYED=key is not None, BLOCK=BLOCK,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["number", "salt"])
def heads_kernel(
    out_at, key_at, number, salt, p, HEADS,
    RESCALE: tl.constexpr, KEYED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the factors of one sample's heads."""
    sample, head = tl.program_id(0), tl.arange(0, BLOCK)
    entry = sample * HEADS + head
    drawn = uniform_at(entry.to(tl.uint32), key_of(key_at, number, KEYED), salt.to(tl.uint32, bitcast=True))
    drawn = tl.where(head < HEADS, drawn, -1.0)
    kept = ((drawn >= p) | (drawn == tl.max(drawn, 0))) & (head < HEADS)
    factor = kept.to(tl.float32)
    if RESCALE:
        # Rounded twice, as torch divides a number by a tensor.
        factor *= tl.div_rn(1.0, tl.sum(factor, 0)) * HEADS
    tl.store(out_at + entry, factor, mask=head < HEADS)


def draw_heads(key: Tensor | None, number: int, salt: int, p: float, rescale: bool, out: Tensor) -> Tensor:
    """Fill `out` (samples, heads) with the factors of `random_draws.head_factors` and return it."""
    samples, heads = out.shape
    if samples:
        with torch.cuda.device_of(out):
            heads_kernel[(samples,)](
                out, out if key is None else key, signed(number), signed(salt), p, heads,
                RESCALE=rescale, KEYED=key is not None, BLOCK=triton.next_power_of_2(heads), num_warps=1,
            )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["number", "salt"])
def noise_kernel(
    out_at, key_at, number, salt, amount_at, ROW, COUNT,
    KEYED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one block of normal numbers times the amount of their row."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    drawn = normal_at(entry.to(tl.uint32), key_of(key_at, number, KEYED), salt.to(tl.uint32, bitcast=True))
    amount = tl.load(amount_at + entry // ROW, mask=entry < COUNT, other=0.0)
    tl.store(out_at + entry, (drawn * amount).to(out_at.dtype.element_ty), mask=entry < COUNT)


def draw_noise(key: Tensor | None, number: int, salt: int, amount: Tensor, out: Tensor) -> Tensor:
    """Fill `out` (B, ...) with the numbers of `random_draws.noise`, with amount (B,), and return it."""
    count = out.numel()
    if count:
        with torch.cuda.device_of(out):
            noise_kernel[(triton.cdiv(count, BLOCK),)](
                out, out if key is None else key, signed(number), signed(salt), amount, count // len(amount), count,
                KEYED=key is not None, BLOCK=BLOCK,
            )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["prefix", "first"])
def key_kernel(out_at, replays_at, prefix, first):
    """Write the key of the next pass and count it."""
    replays = tl.load(replays_at)
    count, h = replays + first, prefix.to(tl.uint32, bitcast=True)
    h = scramble((h ^ count.to(tl.uint32)) * 0x9E3779B1 + 0x7F4A7C15)
    h = scramble((h ^ (count >> 32).to(tl.uint32)) * 0x9E3779B1 + 0x7F4A7C15)
    tl.store(out_at, h.to(tl.int64))
    tl.store(replays_at, replays + 1)


def next_key(prefix: int, first: int, replays: Tensor) -> Tensor:
    """Return the key of `random_draws.next_key`."""
    out = torch.empty_like(replays)
    with torch.cuda.device_of(out):
        key_kernel[(1,)](out, replays, signed(prefix), first, num_warps=1)
    return out


def signed(number: int) -> int:
    """Return the int32 with the same 32 bits, as Triton would take larger numbers for 64-bit ones."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >= 1 << 31 else number
