"""The largest singular value of a head's product."""

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
