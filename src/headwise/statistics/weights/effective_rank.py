"""The effective rank of a head's product."""

import torch
from torch import Tensor

from headwise.statistics.weights.product import Product
from headwise.statistics.weights.weight_statistic import WeightStatistic


class EffectiveRank(WeightStatistic):
    """Gives exp(entropy of σ/Σσ) of each head: d when all singular values are equal, 1 when one is left; 0 for zeros.

    Roy and Vetterli 2007, "The effective rank", EUSIPCO.
    """

    name = "effective_rank"
    unit = "dimensions"
    worse = "low"

    def of(self, product: Product) -> Tensor:
        total = product.spectrum.sum(-1, keepdim=True)
        share = product.spectrum / total.clamp(min=1e-30)
        return torch.special.entr(share).sum(-1).exp() * (total[:, 0] > 0)
