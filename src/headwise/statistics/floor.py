"""The least entropy that logits of a given size allow."""

import torch
from torch import Tensor


def entropy_floor(size: Tensor, keys: Tensor) -> Tensor:
    """Returns the minimum of the entropy (nats) of softmax(a) over ‖a‖₂ ≤ size with `keys` entries; 0 for one key.

    Theorem 3.1 of Zhai et al. 2023, arXiv 2303.06296: with β = exp(−σ√(T/(T−1))), log(1 + (T−1)β) + σ√(T(T−1))β / (1 + (T−1)β).
    """
    several = keys > 1
    keys = keys.clamp_min(2)
    beta = torch.exp(-size * (keys / (keys - 1)).sqrt())
    rest = (keys - 1) * beta
    floor = torch.log1p(rest) + size * (keys * (keys - 1)).sqrt() * beta / (1 + rest)
    return torch.where(several, floor, 0.0)


def largest_eigenvalue(gram: Tensor) -> Tensor:
    """Returns the largest eigenvalue of each symmetric matrix; NaN where a matrix is not finite, as a diverged run has it."""
    finite = gram.isfinite().all(-1).all(-1)
    values = torch.linalg.eigvalsh(torch.where(finite[..., None, None], gram, 0.0))
    return torch.where(finite, values[..., -1], torch.nan)
