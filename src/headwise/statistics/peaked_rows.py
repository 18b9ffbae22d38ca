"""The share of queries that look at one key."""

from headwise.statistics.row_figures import RowFigures
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally

PEAK = 0.9


class PeakedRows(Statistic):
    """Counts the real queries whose largest weight exceeds 0.9, as a share.

    A query with one key looks at it by construction and is left out, unless a learned sink competes with the key.
    """

    name = "peaked_rows"
    unit = "share of queries"
    reduction = "mean over real queries with at least two keys"
    needs = ("peak",)
    worse = "high"

    def tally(self, rows: RowFigures) -> Tally:
        return rows.mean((rows.peak > PEAK).float(), least=2)
