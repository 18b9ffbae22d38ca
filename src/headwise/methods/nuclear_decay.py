"""NuclearDecay."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise import projections
from headwise.core.method import Method
from headwise.core.method_state import MethodState
from headwise.core.site import Site
from headwise.projections.products import factors, refusal

# Singular values below this fraction of the largest count as 0, where the subgradient is 0.
ZERO = 1e-6


class NuclearDecay(Method):
    """Penalises the nuclear norms of the products W_Q·W_Kᵀ and W_O·W_V of each head.

    Weight decay on the factors amounts to this: Kobayashi et al. 2024, arXiv 2410.23819.

    Adds strength · sum of singular values, summed over heads and both products, to the loss, once per loss; the
    subgradient is U·Vᵀ. Computed from QR factors without the products, as the singular values of Aᵀ·B are those of
    R_A·R_Bᵀ. With rotary positions the product is that of tokens at the same position. Set the optimizer's weight decay
    of the attention weights to 0 when using it.
    """

    strength: float = 0.01

    neutral = {"strength": 0.0}
    strong = {"strength": 1.0}
    live = ("strength",)
    penalizes = True

    def check(self) -> None:
        self.require(self.strength >= 0, f"strength must be at least 0, got {self.strength}")

    def refuse(self, site: Site) -> str | None:
        return refusal(site, "NuclearDecay")

    def penalty(self, site: Site, state: MethodState) -> Tensor:
        norms = [nuclear_norm(a, b).sum() for a, b in factors(projections.of(site))]
        return state.value("strength") * torch.stack(norms).sum()


def nuclear_norm(a: Tensor, b: Tensor) -> Tensor:
    """Return the nuclear norms (H,) of Aᵀ·B for factors (H, d, C), (H, d, C'), with subgradient U·Vᵀ."""
    # QR and SVD do not support half precision.
    with torch.autocast(a.device.type, enabled=False):
        u, v = singular_vectors(a, b)
        # ⟨U·Vᵀ, Aᵀ·B⟩ is the norm, and for constant U and V its gradient is the norm's subgradient.
        return ((a @ u) * (b @ v)).sum((-1, -2))


@torch.no_grad()
def singular_vectors(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the singular vectors of Aᵀ·B, U (H, C, d) and V (H, C', d), with U set to 0 for singular values of 0."""
    qa, ra = torch.linalg.qr(a.mT)
    qb, rb = torch.linalg.qr(b.mT)
    left, values, right = torch.linalg.svd(ra @ rb.mT, full_matrices=False)
    nonzero = (values > ZERO * values[..., :1]).to(left.dtype).unsqueeze(-2)
    return qa @ (left * nonzero), qb @ right.mT
