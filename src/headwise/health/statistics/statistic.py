"""The base class of statistics: one health figure of a head or of a layer."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from headwise.files.entry_points import entry_points
from headwise.health.statistics.reading import SiteFacts
from headwise.health.statistics.row_figures import RowFigures
from headwise.health.statistics.tally import Tally

# What a statistic is written with, for its file to import by one line.
__all__ = ["STATISTICS", "OfLayer", "RowFigures", "SiteFacts", "Statistic", "Tally"]

# The registry, used by tests, tables and `watch`.
STATISTICS: dict[str, type["Statistic"]] = {}


class Statistic(ABC):
    """Turns the figures of one pass into one number per head or per layer.

    A subclass is one file: its docstring says what is computed, in which unit, how it is reduced, and its source.
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    # How queries and samples are reduced to one number, as shown in tables.
    reduction: ClassVar[str]
    # "head" or "layer".
    per: ClassVar[str] = "head"
    # The field of `SiteFacts` without which it does not apply, and the reason that is given then.
    requires: ClassVar[tuple[str, str] | None] = None
    # The attributes of `RowFigures` that `tally` reads.
    needs: ClassVar[tuple[str, ...]] = ()
    # Whether "high" or "low" values are a warning sign, or neither; colours and the order "worst first" depend on it.
    worse: ClassVar[str | None] = None

    # Whether it is read where no statistics are named; False for what costs more than it usually tells.
    usual: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        # Registered here for an installed package that imports headwise.health.statistics before its own module, which
        # an entry point names, is complete.
        point = entry_points("headwise.statistics").get(getattr(cls, "name", ""))
        if point is not None and point.module == cls.__module__:
            STATISTICS[cls.name] = cls

    def applies(self, facts: SiteFacts) -> str | None:
        """Return the reason why the statistic does not apply to a site, or None if it does."""
        return None if self.requires is None or getattr(facts, self.requires[0]) else self.requires[1]

    def shape(self, heads: int, heads_before: int) -> tuple[int, ...]:
        """Return the shape of a tally, which must not depend on the call: ranks pack their tallies by it."""
        return (heads,)

    @abstractmethod
    def tally(self, rows: RowFigures) -> Tally:
        """Return the tally of one pass, which can be combined with those of other micro-batches and ranks."""

    def finish(self, tally: Tally) -> Tensor:
        """Return the values (H,), or (1,) for a layer, of a combined tally."""
        return tally.value()


class OfLayer(Statistic):
    """A statistic whose tally holds one number for the layer."""

    per = "layer"

    def shape(self, heads: int, heads_before: int) -> tuple[int, ...]:
        return (1,)
