"""Random draws: numbers as a pure function of where they are used.

A draw is a hash of (run seed, rank, site, pass, method, name, position). It never touches torch's generators, so a
method shifts no other draw of the training, a recomputed layer sees the same bits, blocks of queries see their part of
the whole, and eager and compiled code agree.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

# Hashes have 32 bits, in int64: products of two of them wrap, which keeps their low 32 bits right on every device.
MASK = 0xFFFFFFFF
# 2**32 over the golden ratio, made odd: neighbouring numbers land far apart.
GOLDEN = 0x9E3779B1


def mix(*parts: int | str) -> int:
    """Hash whole numbers and texts to 32 bits (the finalizer of MurmurHash3 over each part)."""
    # The first digits of pi: any number would do, but results on disk rest on this one.
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
    # The same finalizer on int64 tensors that hold 32-bit values: products wrap, the mask cuts them back.
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & MASK
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & MASK
    return h ^ (h >> 16)


def uniform(
    key: int | Tensor, salt: int, shape: tuple[int, ...], device: torch.device, block: slice | None = None
) -> Tensor:
    """Draw fp32 numbers uniform in [0, 1).

    Args:
        key: the pass's key, a whole number or a 0-d int64 tensor.
        salt: tells draws of one pass apart.
        shape: of the whole draw.
        device: where the numbers are needed.
        block: a part of the dimension before the last; the numbers are those of the whole draw at that place.
    """
    index = _positions(shape, device, block)
    if isinstance(key, Tensor) and key.device != device:
        key = key.to(device, non_blocking=True)
    h = _scramble((index * GOLDEN + key) & MASK)
    h = _scramble((h + salt) & MASK)
    # The upper 24 bits, as many as fp32 holds exactly: the result never rounds up to 1.
    return (h >> 8).to(torch.float32) * (1.0 / (1 << 24))


def _positions(shape: tuple[int, ...], device: torch.device, block: slice | None) -> Tensor:
    if block is None:
        return torch.arange(math.prod(shape), device=device).view(shape)
    lead, count, width = shape[:-2], shape[-2], shape[-1]
    row = torch.arange(block.start, block.stop, device=device)[:, None] * width + torch.arange(width, device=device)
    start = torch.arange(math.prod(lead), device=device).view(*lead, 1, 1) * (count * width)
    return start + row


def normal(key: int | Tensor, salt: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Draw fp32 numbers from N(0, 1) (Box-Muller on two uniform draws)."""
    # Two draws of one place, told apart by any constant in the salt. log1p(-u) is finite, for u is below 1.
    radius = uniform(key, salt, shape, device)
    angle = uniform(key, salt ^ 0x5BD1E995, shape, device)
    return torch.sqrt(-2.0 * torch.log1p(-radius)) * torch.cos((2.0 * math.pi) * angle)
