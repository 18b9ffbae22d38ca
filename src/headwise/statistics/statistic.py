"""What a statistic is: one health figure of a head or of a layer."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from headwise.files.entry_points import entry_points
from headwise.statistics.reading import SiteFacts
from headwise.statistics.row_figures import RowFigures
from headwise.statistics.tally import Tally

# The registry: tests, tables and `watch` walk it.
STATISTICS: dict[str, type["Statistic"]] = {}


class Statistic(ABC):
    """Turns the figures of one pass into one number per head or per layer.

    A subclass is one file: its docstring says what is computed, in which unit, how it is reduced, and its source.
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    # How queries and samples become one number, as shown in tables.
    reduction: ClassVar[str]
    per: ClassVar[str] = "head"
    # Figures of the pass that `tally` reads.
    needs: ClassVar[tuple[str, ...]] = ()
    # Whether a larger, a smaller or no value is the worrying one; colours and "worst first" follow it.
    worse: ClassVar[str | None] = None

    def __init_subclass__(cls) -> None:
        # An installed package may import this room while its own module, which an entry point names, is not yet whole.
        point = entry_points("headwise.statistics").get(getattr(cls, "name", ""))
        if point is not None and point.module == cls.__module__:
            STATISTICS[cls.name] = cls

    def applies(self, facts: SiteFacts) -> str | None:
        """Return the reason why the figure has no meaning at a site, None where it has."""
        return None

    def shape(self, heads: int, heads_before: int) -> tuple[int, ...]:
        """Gives the shape of a tally, the same whatever the call: ranks pack their tallies by it."""
        return (heads,)

    @abstractmethod
    def tally(self, rows: RowFigures) -> Tally:
        """Computes the figure of one pass, ready to be joined with those of other micro-batches and ranks."""

    def finish(self, tally: Tally) -> Tensor:
        """Turns a joined tally into values (H,), or (1,) for a layer."""
        return tally.value()
