"""Three definitions of the rank of a head's product, and its norms."""

import torch
from torch import Tensor

from headwise.statistics.weights.product import Product, WeightStatistic


class SpectralNorm(WeightStatistic):
    """Computes σ₁ of W_KᵀW_Q or W_OW_V of each head, in the units of weights squared."""

    name = "spectral_norm"
    unit = "weight²"
    worse = "high"

    def of(self, product: Product) -> Tensor:
        return product.spectrum[:, 0]


class FrobeniusNorm(WeightStatistic):
    """Computes √Σσ² of W_KᵀW_Q or W_OW_V of each head, in the units of weights squared."""

    name = "frobenius_norm"
    unit = "weight²"

    def of(self, product: Product) -> Tensor:
        return torch.linalg.vector_norm(product.spectrum, dim=-1)


class NuclearNorm(WeightStatistic):
    """Computes Σσ of W_KᵀW_Q or W_OW_V of each head, in the units of weights squared.

    Weight decay on the factors penalises it: Kobayashi et al. 2024, arXiv 2410.23819.
    """

    name = "nuclear_norm"
    unit = "weight²"

    def of(self, product: Product) -> Tensor:
        return product.spectrum.sum(-1)


MASS = 0.95


class PseudoRank(WeightStatistic):
    """Computes k/n with the smallest k whose k largest singular values make up 95 % of their sum; 0 for zeros.

    Kobayashi et al. 2024, arXiv 2410.23819. The singular values are not squared. n is the head size; `of_model=True`
    divides by the model's width instead.
    """

    name = "pseudo_rank"
    unit = "share of the head size"
    worse = "low"

    def __init__(self, of_model: bool = False) -> None:
        self.of_model = of_model

    def of(self, product: Product) -> Tensor:
        sums = product.spectrum.double().cumsum(-1)
        # The tolerance keeps rounding of the sums from adding 1 to k at exactly 95 %.
        below = sums < MASS * sums[:, -1:] * (1 - 1e-9)
        count = (below.sum(-1) + 1) * (sums[:, -1] > 0)
        share = count.to(product.spectrum.dtype) / (product.width if self.of_model else product.size)
        return torch.where(sums[:, -1].isnan(), torch.nan, share)


class EffectiveRank(WeightStatistic):
    """Computes exp(entropy of σ/Σσ) of each head: d if all singular values are equal, 1 if one is not 0, 0 for zeros.

    Roy and Vetterli 2007, "The effective rank", EUSIPCO.
    """

    name = "effective_rank"
    unit = "dimensions"
    worse = "low"

    def of(self, product: Product) -> Tensor:
        total = product.spectrum.sum(-1, keepdim=True)
        share = product.spectrum / total.clamp(min=1e-30)
        return torch.special.entr(share).sum(-1).exp() * (total[:, 0] > 0)


class StableRank(WeightStatistic):
    """Computes Σσ² / σ₁² of each head: between 1 and d, robust to small singular values; 0 for zeros.

    Rudelson and Vershynin 2007, arXiv math/0503442.
    """

    name = "stable_rank"
    unit = "dimensions"
    worse = "low"

    def of(self, product: Product) -> Tensor:
        largest = product.spectrum[:, :1]
        return (product.spectrum / largest.clamp(min=1e-30)).square().sum(-1) * (largest[:, 0] > 0)
