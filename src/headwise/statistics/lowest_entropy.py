"""The lowest entropy of any row of a head."""

from headwise.statistics.row_figures import RowFigures
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally


class LowestEntropy(Statistic):
    """Takes the smallest row entropy of each head, in nats.

    A query that has one key has entropy 0 by construction and is left out. On a sample of the queries it is only an upper bound
    of the true minimum, and its record is marked `sampled`.
    """

    name = "lowest_entropy"
    unit = "nats"
    reduction = "minimum over real queries with at least two keys"
    needs = ("entropy",)

    def tally(self, rows: RowFigures) -> Tally:
        return rows.extremum(rows.entropy, "min", least=2)
