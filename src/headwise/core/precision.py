"""The precision of sums: half precision is widened, what is wider stays."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """Return a tensor in fp32, or as it is where its own precision is higher."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def norms(x: Tensor) -> Tensor:
    """Return the norms over the last dimension of x, summed in fp32, or in its own precision where that is higher."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
