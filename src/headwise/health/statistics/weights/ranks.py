"""Three definitions of the rank of a head's product, its norms, and how far the ranks of its factors are apart."""

import torch
from torch import Tensor

from headwise.health.statistics.weights.product import Product, WeightStatistic, singular_values, unbalanced
from headwise.numerics.heavy_tail import hill_exponent
from headwise.numerics.precision import norms


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
        return norms(product.spectrum)


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
        return _leading(product.relative_spectrum) / (product.width if self.of_model else product.size)


def _leading(spectrum: Tensor) -> Tensor:
    """Return the least number (n,) of singular values (n, d) that make up 95 % of their sum; NaN if one is NaN."""
    sums = spectrum.double().cumsum(-1)
    # The tolerance keeps rounding of the sums from adding 1 to the number at exactly 95 %.
    below = sums < MASS * sums[:, -1:] * (1 - 1e-9)
    count = (below.sum(-1) + 1) * (sums[:, -1] > 0)
    return torch.where(sums[:, -1].isnan(), torch.nan, count.to(spectrum.dtype))


ROTATED = "with rotary positions weight decay balances traces of queries and keys, which have no rank"


class RankGap(WeightStatistic):
    """Computes |r(Σ_h P_hᵀP_h) − r(W_VW_Vᵀ)| / d with pseudo-ranks r, and the same for queries and keys.

    Under weight decay the two matrices become equal (Kobayashi et al. 2024, arXiv 2410.23819), and with them their
    ranks. The sum is over the heads of a group. With rotary positions only traces of queries and keys balance.
    """

    name = "rank_gap"
    unit = "share of the head size"
    per = "group"

    def applies(self, product: Product) -> str | None:
        return unbalanced(product) or (ROTATED if product.pairs is not None else None)

    def of(self, product: Product) -> Tensor:
        own, shared = (
            _leading(singular_values(gram)) for gram in (product.in_units.own_gram, product.in_units.shared_gram)
        )
        return (own - shared).abs() / product.size


class EffectiveRank(WeightStatistic):
    """Computes exp(entropy of σ/Σσ) of each head: d if all singular values are equal, 1 if one is not 0, 0 for zeros.

    Roy and Vetterli 2007, "The effective rank", EUSIPCO.
    """

    name = "effective_rank"
    unit = "dimensions"
    worse = "low"

    def of(self, product: Product) -> Tensor:
        spectrum = product.relative_spectrum
        total = spectrum.sum(-1, keepdim=True)
        share = spectrum / torch.where(total == 0, 1, total)
        return torch.special.entr(share).sum(-1).exp() * (total[:, 0] > 0)


class StableRank(WeightStatistic):
    """Computes Σσ² / σ₁² of each head: between 1 and d, robust to small singular values; 0 for zeros.

    Rudelson and Vershynin 2007, arXiv math/0503442.
    """

    name = "stable_rank"
    unit = "dimensions"
    worse = "low"

    def of(self, product: Product) -> Tensor:
        spectrum = product.relative_spectrum
        largest = spectrum[:, :1]
        return (spectrum / torch.where(largest == 0, 1, largest)).square().sum(-1) * (largest[:, 0] > 0)


# An exponent above it means eigenvalues that agree but for rounding.
FLAT = 1e4


class AlphaHill(WeightStatistic):
    """Computes PL_Alpha_Hill of each head's product: 1 + k / Σ ln(λ_j / λ_i) over the upper half of its eigenvalues λ.

    He et al. 2025, arXiv 2506.14562, read it of each weight matrix, to set its decay (`headwise.AlphaDecay`); here λ
    are the squared singular values of W_KᵀW_Q or W_OW_V. A heavier tail has a lower exponent. 0 where there is no tail:
    if all values of the upper half agree, or one of them is 0.
    """

    name = "alpha_hill"
    unit = "exponent"

    def of(self, product: Product) -> Tensor:
        spectrum = product.relative_spectrum
        exponent = hill_exponent(spectrum).nan_to_num(nan=0.0, posinf=0.0)
        exponent = torch.where(exponent > FLAT, 0.0, exponent)
        return torch.where(spectrum.isnan().any(-1), torch.nan, exponent)
