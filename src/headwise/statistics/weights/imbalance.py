"""How far the factors of a product are from balance."""

import torch
from torch import Tensor

from headwise.statistics.weights.product import Product
from headwise.statistics.weights.weight_statistic import NORMED, WeightStatistic


class Imbalance(WeightStatistic):
    """Gives ‖Σ_h P_hᵀP_h − W_VW_Vᵀ‖_F (and the same for queries and keys) as a share of the two norms' sum, between 0 and 1.

    Kobayashi et al. 2024, arXiv 2410.23819: weight decay λ lets the difference vanish as e^{−2λt}, so that a small share says that decay has
    acted long enough for the law; the sum runs over the heads of a group. With rotary positions queries and keys
    balance only in the traces of rotary pairs: those are compared.
    """

    name = "imbalance"
    unit = "share"
    per = "group"

    def applies(self, product: Product) -> str | None:
        return NORMED if product.normed else None

    def of(self, product: Product) -> Tensor:
        own, shared = conserved(product)
        size = _norm(own) + _norm(shared)
        return _norm(own - shared) / size.clamp(min=1e-30)


def conserved(product: Product) -> tuple[Tensor, Tensor]:
    """Give what gradient flow without decay keeps the difference of: Gram matrices (G, d, d), or traces (G, pairs) with rotation."""
    if product.pairs is None:
        return product.own_gram, product.shared_gram
    once = (product.pairs[:, 0] != product.pairs[:, 1]).to(product.own)
    traces = []
    for gram in (product.own_gram, product.shared_gram):
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        traces.append(diagonal[:, product.pairs[:, 0]] + once * diagonal[:, product.pairs[:, 1]])
    return traces[0], traces[1]


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.flatten(1), dim=-1)
