"""Attention entropy per head as a share of the largest possible one."""

from headwise.statistics.row_figures import RowFigures
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally


class EntropyShare(Statistic):
    """Averages H_i / log(allowed keys of row i) over real queries: 1 is uniform attention, 0 is one key.

    The range of entropy differs between the rows of a causal or padded call, so each row is divided by its own. A query with one
    key has no range and is left out; a learned sink counts as a key.
    """

    name = "entropy_share"
    unit = "share of log(keys)"
    reduction = "mean over real queries with at least two keys"
    needs = ("entropy",)
    worse = "low"

    def tally(self, rows: RowFigures) -> Tally:
        columns = (rows.queries.counts + rows.columns_of_softmax).clamp_min(2)
        return rows.mean(rows.entropy / columns.log(), least=2)
