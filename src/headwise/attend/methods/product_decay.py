"""ProductDecay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.attend.core import Method, MethodState, Site
from headwise.attend.projections.gram_penalty import gram_penalty
from headwise.attend.projections.products import refusal, weighted_products


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
        return torch.stack(self.penalties([(site, state)])).sum()

    def penalties(self, fits: Sequence[tuple[Site, MethodState]]) -> list[Tensor]:
        return gram_penalty(weighted_products(fits), half_squares)


def half_squares(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ½·‖Aᵀ·B‖² (N,) from the Gram matrices (N, d, d) of A and B, and the matrices of its gradients."""
    return 0.5 * (a * b).sum((-1, -2)), b, a
