"""The base class of weight statistics: one figure of a head's product, from weights alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from headwise.statistics.weights.product import Product

NORMED = "queries and keys are normalised after the projection, so that the law of weight decay does not apply to them"

COMMON = "all heads share rows of the keys, so weight decay does not balance the factors of a single head"


def unbalanced(product: Product) -> str | None:
    """Return the reason why weight decay does not balance the factors of a head or group, or None if it does."""
    return NORMED if product.normed else COMMON if product.common else None


class WeightStatistic(ABC):
    """Turns a product into one number per head, or per group of heads that share keys and values.

    A subclass is one file: its docstring says what is computed, in which unit, and its source.
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    # "head", or "group" for one figure of all heads that share keys and values.
    per: ClassVar[str] = "head"
    # Whether a "high" or a "low" value is a warning sign, or neither.
    worse: ClassVar[str | None] = None

    def applies(self, product: Product) -> str | None:
        """Return the reason why the statistic does not apply to a product, or None if it does."""
        return None

    @abstractmethod
    def of(self, product: Product) -> Tensor:
        """Return the figure, (H,) per head or (G,) per group."""
