"""Random draws: numbers that are a pure function of where they are used.

A draw is a hash of (run seed, rank, site, pass, method, name, position). It never touches torch's generators. Therefore
a method changes no other random number of the training, a recomputed layer draws the same bits, a block of queries gets
its part of the whole draw, and eager and compiled code agree.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

# 32-bit hashes in int64: a product of two may overflow, but its low 32 bits are correct on every device.
MASK = 0xFFFFFFFF
# 2**32 divided by the golden ratio, made odd: it spreads neighbouring numbers far apart.
GOLDEN = 0x9E3779B1


def mix(*parts: int | str) -> int:
    """Return a 32-bit hash of integers and strings (the finalizer of MurmurHash3 over each part)."""
    # The first digits of pi. Any number would do, but results on disk depend on this one.
    h = 0x243F6A88
    for part in parts:
        value = zlib.crc32(part.encode()) if isinstance(part, str) else part
        for word in (value & MASK, (value >> 32) & MASK):
            h = _finish(((h ^ word) * GOLDEN + 0x7F4A7C15) & MASK)
    return h


def _finish(h: int) -> int:
    h ^= h >> 16
    h = (h * 0x85EBCA6B) & MASK
    h ^= h >> 13
    h = (h * 0xC2B2AE35) & MASK
    return h ^ (h >> 16)


def _scramble(h: Tensor) -> Tensor:
    # The same finalizer on int64 tensors of 32-bit values; the mask removes what overflows.
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & MASK
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & MASK
    return h ^ (h >> 16)


def uniform(
    key: int | Tensor, salt: int, shape: tuple[int, ...], device: torch.device, block: slice | None = None
) -> Tensor:
    """Return fp32 numbers drawn uniformly from [0, 1).

    Args:
        key: the pass's key, an integer or a 0-d int64 tensor.
        salt: separates the draws of one pass.
        shape: shape of the whole draw.
        device: device of the result.
        block: slice of the last dimension but one; only that part of the whole draw is returned.
    """
    index = _positions(shape, device, block)
    if isinstance(key, Tensor) and key.device != device:
        key = key.to(device, non_blocking=True)
    # The low 32 bits of a position determine those of the product. Unmasked, a GPU's compiler multiplies in int32.
    h = _scramble(((index & MASK) * GOLDEN + key) & MASK)
    h = _scramble((h + salt) & MASK)
    # The upper 24 bits, which fp32 represents exactly: the result never rounds up to 1.
    return (h >> 8).to(torch.float32) * (1.0 / (1 << 24))


def _positions(shape: tuple[int, ...], device: torch.device, block: slice | None) -> Tensor:
    if block is None:
        return torch.arange(math.prod(shape), device=device).view(shape)
    lead, count, width = shape[:-2], shape[-2], shape[-1]
    row = torch.arange(block.start, block.stop, device=device)[:, None] * width + torch.arange(width, device=device)
    start = torch.arange(math.prod(lead), device=device).view(*lead, 1, 1) * (count * width)
    return start + row


def normal(key: int | Tensor, salt: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return fp32 numbers drawn from N(0, 1), by Box-Muller on two uniform draws."""
    # An arbitrary constant in the salt separates the two draws. log1p(-u) is finite because u is below 1.
    radius = uniform(key, salt, shape, device)
    angle = uniform(key, salt ^ 0x5BD1E995, shape, device)
    return torch.sqrt(-2.0 * torch.log1p(-radius)) * torch.cos((2.0 * math.pi) * angle)
