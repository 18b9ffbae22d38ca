"""ProductDecay."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise import projections
from headwise.core.method import Method
from headwise.core.method_state import MethodState
from headwise.core.site import Site
from headwise.projections.products import factors, refusal


class ProductDecay(Method):
    """Decays the products W_Q·W_Kᵀ and W_O·W_V of each head instead of their factors.

    Khodak et al. 2021, arXiv 2105.01029 (Frobenius decay).

    Adds strength / 2·(‖W_Q·W_Kᵀ‖² + ‖W_O·W_V‖²), summed over heads, to the loss, once per loss. Computed from the Gram
    matrices of the factors without the products: ‖Aᵀ·B‖² = ⟨A·Aᵀ, B·Bᵀ⟩. With rotary positions the product is that of
    tokens at the same position. Set the optimizer's weight decay of the attention weights to 0 when using it.
    """

    strength: float = 0.01

    neutral = {"strength": 0.0}
    strong = {"strength": 1.0}
    live = ("strength",)
    penalizes = True

    def check(self) -> None:
        self.require(self.strength >= 0, f"strength must be at least 0, got {self.strength}")

    def refuse(self, site: Site) -> str | None:
        return refusal(site, "ProductDecay")

    def penalty(self, site: Site, state: MethodState) -> Tensor:
        squares = [squared_frobenius(a, b).sum() for a, b in factors(projections.of(site))]
        return 0.5 * state.value("strength") * torch.stack(squares).sum()


def squared_frobenius(a: Tensor, b: Tensor) -> Tensor:
    """Return ‖Aᵀ·B‖² of factors (H, d, C), (H, d, C'), as (H,)."""
    # In half precision the sum of squares would have about three digits.
    with torch.autocast(a.device.type, enabled=False):
        return ((a @ a.mT) * (b @ b.mT)).sum((-1, -2))
