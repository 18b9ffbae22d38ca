"""Sums and norms in at least single precision."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """Return x in fp32, or unchanged if its precision is higher."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def norms(x: Tensor) -> Tensor:
    """Return the norms over the last dimension of x, in fp32 or in its own precision if that is higher."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
