"""Sums and norms in at least single precision, of numbers whose squares may leave its range."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# Between these, a norm computed in fp32 is exact to rounding: what underflows in its squares does not count.
SMALL, LARGE = 1e-15, 1e18
# The integers of the size of a number, and the bits of its exponent.
EXPONENTS = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF0000000000000)}

WIDE = (torch.float32, torch.float64)


def at_least_fp32(x: Tensor) -> Tensor:
    """Return x in fp32, or unchanged if its precision is higher."""
    # Small tensors are converted in every call, and asking torch for the same dtype takes as long as a product of them.
    return x if x.dtype in WIDE else x.to(torch.promote_types(x.dtype, torch.float32))


def magnitude(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return the largest power of two that is at most the largest |x| over `dim`, with these dimensions kept.

    Divided by it, x changes no digit and has squares within the range of fp32. It is 1 for zeros, and for numbers that
    are not finite, so that they stay what they are. It has no gradient.
    """
    x = x.detach()
    if not x.numel():
        return at_least_fp32(x).sum(dim, keepdim=True) + 1
    if x.device.type == "cpu":
        # Two reductions are ten times as fast as torch's largest absolute value.
        largest = at_least_fp32(torch.maximum(x.amax(dim, keepdim=True), -x.amin(dim, keepdim=True)))
    else:
        wide = torch.promote_types(x.dtype, torch.float32)
        largest = torch.linalg.vector_norm(x, math.inf, dim, keepdim=True, dtype=wide)
    limits = torch.finfo(largest.dtype)
    # Few operations, because this is computed for many small tensors: zeros become 1, and so does what is not finite.
    sized = F.threshold(largest, 0.0, 1.0).nan_to_num_(1.0, 1.0).clamp_min_(limits.tiny)
    bits, exponent = EXPONENTS[largest.dtype]
    return (sized.view(bits) & exponent).view(largest.dtype)


def norms(x: Tensor) -> Tensor:
    """Return the norms over the last dimension of x, in fp32 or in its own precision if that is higher.

    Correct for all finite x, also where squares underflow or overflow; NaN or infinity for others.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.device.type == "cuda" and wide == torch.float32:
        # Squares of fp32 stay within the range of fp64.
        return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).float()
    if x.device.type == "cpu":
        plain = torch.linalg.vector_norm(x, dim=-1, dtype=wide)
        # A scaled copy costs ten times as much as the norms. Looking at them would wait for another device.
        if bool(((plain > SMALL) & (plain < LARGE)).all()):
            return plain
    size = magnitude(x, -1)
    return torch.linalg.vector_norm(at_least_fp32(x) / size, dim=-1) * size[..., 0]


def directions(x: Tensor) -> Tensor:
    """Return the unit vectors along x over its last dimension, in the precision of `norms`; zeros for zeros."""
    size = norms(x)[..., None]
    return at_least_fp32(x) / torch.where(size == 0, 1.0, size)


def entropy_of(log_total: Tensor, fall: Tensor, total: Tensor) -> Tensor:
    """Return the entropy of softmax rows in nats, H = log Z - sum(e D) / Z, computed in place.

    This form stays accurate when the entropy is close to 0. With D = s - max(s) and e = exp(D) of each row, `log_total`
    is log Z, `fall` is sum(e D), and `total` is Z = sum(e).
    """
    return log_total.sub_(fall.div_(total))
