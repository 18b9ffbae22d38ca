"""Norms of a head's product."""

import torch
from torch import Tensor

from headwise.statistics.weights.product import Product
from headwise.statistics.weights.weight_statistic import WeightStatistic


class SpectralNorm(WeightStatistic):
    """Gives σ₁ of W_KᵀW_Q or W_OW_V of each head, in the units of weights squared."""

    name = "spectral_norm"
    unit = "weight²"
    worse = "high"

    def of(self, product: Product) -> Tensor:
        return product.spectrum[:, 0]


class FrobeniusNorm(WeightStatistic):
    """Gives √Σσ² of W_KᵀW_Q or W_OW_V of each head, in the units of weights squared."""

    name = "frobenius_norm"
    unit = "weight²"

    def of(self, product: Product) -> Tensor:
        return torch.linalg.vector_norm(product.spectrum, dim=-1)


class NuclearNorm(WeightStatistic):
    """Gives Σσ of W_KᵀW_Q or W_OW_V of each head, in the units of weights squared: what weight decay on the factors
    penalises.

    Kobayashi et al. 2024, arXiv 2410.23819.
    """

    name = "nuclear_norm"
    unit = "weight²"

    def of(self, product: Product) -> Tensor:
        return product.spectrum.sum(-1)
