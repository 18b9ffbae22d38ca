"""How far the factors of a product are from the nuclear norm's bound."""

from torch import Tensor

from headwise.statistics.weights.balance import balance
from headwise.statistics.weights.product import Product
from headwise.statistics.weights.weight_statistic import NORMED, WeightStatistic


class NuclearGap(WeightStatistic):
    """Gives (½(‖A‖_F² + ‖B‖_F²) − ‖AᵀB‖_*) / ½(‖A‖_F² + ‖B‖_F²) of each group: 0 where weight decay has made both equal, at most 1.

    Kobayashi et al. 2024, arXiv 2410.23819. Under grouped queries A joins the heads of the group. With rotary positions
    the product is that of tokens at the same position, and the gap of queries and keys need not close.
    """

    name = "nuclear_gap"
    unit = "share"
    per = "group"

    def applies(self, product: Product) -> str | None:
        return NORMED if product.normed else None

    def of(self, product: Product) -> Tensor:
        found = balance(product)
        return (found.frobenius - found.nuclear) / found.frobenius.clamp(min=1e-30)
