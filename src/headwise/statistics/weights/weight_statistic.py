"""What a weight statistic is: one figure of a head's product, from weights alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from headwise.statistics.weights.product import Product

NORMED = "queries and keys are normalised after the projection, so that the law of weight decay does not apply to them"

COMMON = "all heads share rows of the keys, so that what weight decay balances is no figure of one head"


def unbalanced(product: Product) -> str | None:
    """Say why weight decay leaves no balance in a product of one head or group, or None where it does."""
    return NORMED if product.normed else COMMON if product.common else None


class WeightStatistic(ABC):
    """Turns a product into one number per head, or per group of heads that share keys and values.

    A subclass is one file: its docstring says what is computed, in which unit, and its source.
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    # "head", or "group" where the figure belongs to the heads that share keys and values together.
    per: ClassVar[str] = "head"
    # Whether a "high" or a "low" value is the worrying one, or neither.
    worse: ClassVar[str | None] = None

    def applies(self, product: Product) -> str | None:
        """Return the reason why the figure has no meaning for a product, None where it has."""
        return None

    @abstractmethod
    def of(self, product: Product) -> Tensor:
        """Compute the figure, (H,) per head or (G,) per group."""
