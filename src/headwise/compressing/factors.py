"""Factors: the product of two projections, head by head, cut to the rank that holds a share of its singular values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# singular values that are 0 but for the rounding of weights in single precision must not count
ROUNDING = 1e-6


@dataclass(frozen=True, eq=False)
class Cut:
    """The factors of one group after the cut: AᵀB ≈ ownᵀ · shared for each head of the group.

    Attributes:
        own: (heads of the group, rank, C).
        shared: (rank, C'), of the keys or values that the heads share.
    """

    own: Tensor
    shared: Tensor

    @property
    def rank(self) -> int:
        """Return the rows that are left of each factor."""
        return self.shared.shape[0]


def cut(own: Tensor, shared: Tensor, energy: float | None) -> list[Cut]:
    """Cut the products own_hᵀ · shared_g, the heads of a group together, to their pseudo-rank; both factors end
    balanced.

    Eckart and Young 1936, doi 10.1007/BF02288367: no other factors of that rank are nearer to the product. The
    pseudo-rank is that of Kobayashi et al. 2024, arXiv 2410.23819: singular values are summed, not squared.

    Args:
        own: (H, d, C), the factor that each head has for itself: queries or output.
        shared: (G, d, C'), keys or values; G divides H.
        energy: the share of the singular values' sum that is kept; None keeps all of them, those of 0 too.
    """
    apart = own.double().unflatten(0, (len(shared), -1))
    return [_cut(heads, one, energy) for heads, one in zip(apart, shared.double(), strict=True)]


def _cut(own: Tensor, shared: Tensor, energy: float | None) -> Cut:
    heads, _, channels = own.shape
    # (heads · C, d): all products of the group under each other
    left, left_root = torch.linalg.qr(own.transpose(1, 2).flatten(0, 1))
    right, right_root = torch.linalg.qr(shared.mT)
    u, values, vt = torch.linalg.svd(left_root @ right_root.mT, full_matrices=False)
    rank = len(values) if energy is None else pseudo_rank(values, energy)
    root = values[:rank].sqrt()
    made = (left @ u[:, :rank] * root).view(heads, channels, rank)
    return Cut(made.transpose(1, 2), (right @ vt.mT[:, :rank] * root).mT)


def pseudo_rank(values: Tensor, energy: float) -> int:
    """Return the smallest number of singular values, largest first, that hold the share `energy` of their sum; at least
    1."""
    reached = values.cumsum(0)
    return min(int((reached < energy * reached[-1] * (1 - ROUNDING)).sum()) + 1, len(values))
