"""The heavy tail of a matrix: the exponent of a power law that its largest eigenvalues follow."""

from __future__ import annotations

import torch
from torch import Tensor


def hill_exponent(values: Tensor) -> Tensor:
    """Return PL_Alpha_Hill (n,) of singular values (n, d), in any order: Hill's estimate over half of the eigenvalues.

    With the squares λ_1 <= … <= λ_d and the tail from λ_i on, i = ⌊d / 2⌋ counted from 0, it is 1 + k / Σ_tail ln(λ_j /
    λ_i) with k = d - i, as the authors of AlphaDecay compute it (He et al. 2025, arXiv 2506.14562). Lower is a heavier
    tail. Infinite if all values of the tail agree, NaN if the tail begins at zero or a value is not finite.
    """
    logs = 2 * values.log().sort(-1).values
    tail = logs[:, logs.shape[1] // 2 :]
    spread = (tail - tail[:, :1]).sum(-1)
    finite = tail.isfinite().all(-1)
    return torch.where(finite, 1 + tail.shape[1] / spread, torch.nan)
