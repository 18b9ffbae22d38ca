"""Sums and norms in at least single precision, of numbers whose squares may leave its range."""

from __future__ import annotations

import torch
from torch import Tensor

# Between these, a norm computed in fp32 is exact to rounding: what underflows in its squares does not count.
SMALL, LARGE = 1e-15, 1e18


def at_least_fp32(x: Tensor) -> Tensor:
    """Return x in fp32, or unchanged if its precision is higher."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def magnitude(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return the largest power of two that is at most the largest |x| over `dim`, with these dimensions kept.

    Divided by it, x changes no digit and has squares within the range of fp32. It is 1 for zeros, and for numbers that
    are not finite, so that they stay what they are.
    """
    if not x.numel():
        return at_least_fp32(x).sum(dim, keepdim=True) + 1
    # Two reductions are faster than one of |x|, which would be a copy.
    largest = at_least_fp32(torch.maximum(x.amax(dim, keepdim=True), -x.amin(dim, keepdim=True)))
    limits = torch.finfo(largest.dtype)
    power = largest.clamp(limits.tiny, limits.max / 2).log2().floor().exp2()
    return torch.where((largest > 0) & largest.isfinite(), power, 1.0)


def norms(x: Tensor) -> Tensor:
    """Return the norms over the last dimension of x, in fp32 or in its own precision if that is higher.

    Correct for all finite x, also where squares underflow or overflow; NaN or infinity for others.
    """
    plain = torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
    # On a CPU a scaled copy costs ten times as much as the norms; elsewhere looking at them would wait for the device.
    if x.device.type == "cpu" and bool(((plain > SMALL) & (plain < LARGE)).all()):
        return plain
    size = magnitude(x, -1)
    return torch.linalg.vector_norm(at_least_fp32(x) / size, dim=-1) * size[..., 0]


def directions(x: Tensor) -> Tensor:
    """Return the unit vectors along x over its last dimension, in the precision of `norms`; zeros for zeros."""
    size = norms(x)[..., None]
    return at_least_fp32(x) / torch.where(size == 0, 1.0, size)
