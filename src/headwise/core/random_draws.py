"""Random draws: numbers that are a pure function of where they are used.

A draw is a hash of (run seed, rank, site, pass, method, name, position). It never touches torch's generators. Therefore
a method changes no other random number of the training, a recomputed layer draws the same bits, a block of queries gets
its part of the whole draw, and eager and compiled code agree. On CUDA a draw is one Triton kernel (`triton_draws`) with
the same bits.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from headwise.core.kernels import kernels_run_on

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


# The kinds of numbers that the kernel draws: uniform, normal, and whether a uniform number is at least p.
UNIFORM, NORMAL, KEPT = 0, 1, 2
DTYPES = (torch.float32, torch.float32, torch.bool)


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
    if _one_kernel(device):
        return _drawn(UNIFORM, key, salt, 0.0, shape, device, block)
    return _uniform(key, salt, shape, device, block)


def normal(key: int | Tensor, salt: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return fp32 numbers drawn from N(0, 1), by Box-Muller on two uniform draws."""
    if _one_kernel(device):
        return _drawn(NORMAL, key, salt, 0.0, shape, device, None)
    return _normal(key, salt, shape, device)


def kept(key: int | Tensor, salt: int, p: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return bools, True with probability 1 - p (0-d, fp32): whether `uniform` draws a number of at least p."""
    if _one_kernel(device) and p.device.type == "cpu":
        return _drawn(KEPT, key, salt, float(p), shape, device, None)
    return uniform(key, salt, shape, device) >= p


def _one_kernel(device: torch.device) -> bool:
    # A compiled graph fuses the operators below into those that use the numbers, which costs no launch at all.
    return device.type == "cuda" and not torch.compiler.is_compiling()


def _drawn(
    kind: int,
    key: int | Tensor,
    salt: int,
    p: float,
    shape: tuple[int, ...],
    device: torch.device,
    block: slice | None,
) -> Tensor:
    given, number = (key, 0) if isinstance(key, Tensor) else (None, key)
    part = [] if block is None else [block.start, block.stop]
    return draw_on_device(given, number, salt, p, list(shape), part, kind, device=device)


@torch.library.custom_op("headwise::draw", mutates_args=())
def draw_on_device(
    key: Tensor | None,
    number: int,
    salt: int,
    p: float,
    shape: list[int],
    block: list[int],
    kind: int,
    *,
    device: torch.device,
) -> Tensor:
    """Return a draw, or the rows [start, stop] = `block` of it; `number` is the key unless `key` gives it.

    One operator, and so one launch to programs that count launches, with the kernel and without it.
    """
    if not kernels_run_on(device):
        part = slice(*block) if block else None
        of = number if key is None else key
        if kind == NORMAL:
            return _normal(of, salt, tuple(shape), device)
        drawn = _uniform(of, salt, tuple(shape), device, part)
        return drawn >= p if kind == KEPT else drawn
    from headwise.core import triton_draws

    key = key if key is None or key.device == device else key.to(device, non_blocking=True)
    out = torch.empty(_part_of(shape, block), dtype=DTYPES[kind], device=device)
    return triton_draws.draw(kind, key, number, salt, p, shape, block, out)


@draw_on_device.register_fake
def _(
    key: Tensor | None,
    number: int,
    salt: int,
    p: float,
    shape: list[int],
    block: list[int],
    kind: int,
    *,
    device: torch.device,
) -> Tensor:
    return torch.empty(_part_of(shape, block), dtype=DTYPES[kind], device=device)


def _part_of(shape: list[int], block: list[int]) -> list[int]:
    return [*shape[:-2], block[1] - block[0], shape[-1]] if block else shape


def _uniform(key: int | Tensor, salt: int, shape: tuple[int, ...], device: torch.device, block: slice | None) -> Tensor:
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


def _normal(key: int | Tensor, salt: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    # An arbitrary constant in the salt separates the two draws. log1p(-u) is finite because u is below 1.
    radius = _uniform(key, salt, shape, device, None)
    angle = _uniform(key, salt ^ 0x5BD1E995, shape, device, None)
    return torch.sqrt(-2.0 * torch.log1p(-radius)) * torch.cos((2.0 * math.pi) * angle)
