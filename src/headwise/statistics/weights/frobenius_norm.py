"""The Frobenius norm of a head's product."""

import torch
from torch import Tensor

from headwise.statistics.weights.product import Product
from headwise.statistics.weights.weight_statistic import WeightStatistic


class FrobeniusNorm(WeightStatistic):
    """Gives √Σσ² of W_KᵀW_Q or W_OW_V of each head, in the units of weights squared."""

    name = "frobenius_norm"
    unit = "weight²"

    def of(self, product: Product) -> Tensor:
        return torch.linalg.vector_norm(product.spectrum, dim=-1)
