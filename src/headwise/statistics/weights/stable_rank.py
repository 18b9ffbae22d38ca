"""The stable rank of a head's product."""

from torch import Tensor

from headwise.statistics.weights.product import Product
from headwise.statistics.weights.weight_statistic import WeightStatistic


class StableRank(WeightStatistic):
    """Gives Σσ² / σ₁² of each head: between 1 and d, robust against small singular values; 0 for a product of zeros.

    Rudelson and Vershynin 2007, arXiv math/0503442.
    """

    name = "stable_rank"
    unit = "dimensions"
    worse = "low"

    def of(self, product: Product) -> Tensor:
        largest = product.spectrum[:, :1]
        return (product.spectrum / largest.clamp(min=1e-30)).square().sum(-1) * (largest[:, 0] > 0)
