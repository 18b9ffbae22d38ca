"""What one step of an optimizer does to the product of queries and keys, read from its factors."""

import torch
from torch import Tensor


def update_spectrum(q: Tensor, k: Tensor, q_after: Tensor, k_after: Tensor) -> Tensor:
    """Return the singular values (H, r), r = min(2d, C), of ΔW_qᵀW_k + W_qᵀΔW_k of each head, largest first.

    That is the first order of the change of W_qᵀW_k, with W_q and W_k as (d, C), head by head. It has rank 2d at most
    and is never formed: [ΔW_qᵀ W_qᵀ][W_kᵀ ΔW_kᵀ]ᵀ has the singular values of R_q R_kᵀ, the triangles of the QR factors
    of both.

    Args:
        q: queries' weights before the step, (H, d, C).
        k: keys' weights before the step, (G, d, C); G divides H.
        q_after: queries' weights after it.
        k_after: keys' weights after it.
    """
    repeat = q.shape[0] // k.shape[0]
    wide = torch.cat([q_after - q, q], 1).mT
    tall = torch.cat([k, k_after - k], 1).mT
    finite = wide.isfinite().all(-1).all(-1) & tall.isfinite().all(-1).all(-1).repeat_interleave(repeat)
    left = torch.linalg.qr(wide.nan_to_num(0.0, 0.0, 0.0), mode="r")[1]
    right = torch.linalg.qr(tall.nan_to_num(0.0, 0.0, 0.0), mode="r")[1].repeat_interleave(repeat, 0)
    values = torch.linalg.svdvals(left @ right.mT)
    return torch.where(finite[:, None], values, torch.nan)


def spectral_entropy(values: Tensor) -> Tensor:
    """Return −Σ p log p of p = σ/Σσ over the last dimension, in nats: 0 for rank one, log r where all r are equal.

    Roy and Vetterli 2007, whose effective rank is e to this power. NaN where all values are zero: nothing moved.
    """
    share = values / values.sum(-1, keepdim=True)
    return -torch.special.xlogy(share, share).sum(-1)
