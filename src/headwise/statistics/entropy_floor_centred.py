"""How far the entropy of a head could fall with the queries and keys it has."""

from headwise.statistics.floor import entropy_floor
from headwise.statistics.row_figures import RowFigures
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally


class EntropyFloorCentred(Statistic):
    """Averages over real queries the floor of Theorem 3.1 at σ_i = ‖a_i − ā_i‖, the row's logits about their mean.

    Zhai et al. 2023, arXiv 2303.06296; softmax ignores the mean of a row, so the centred norm may stand for the spectral one and is much
    tighter. Row i counts its own allowed keys, so causal and masked calls use the causal form; with no mask the norm is found
    from sums over keys alone. A row with one key has floor 0.
    """

    name = "entropy_floor_centred"
    unit = "nats"
    reduction = "mean over real queries with a key"
    needs = ("centred",)

    def tally(self, rows: RowFigures) -> Tally:
        columns = rows.queries.counts + rows.columns_of_softmax
        return rows.mean(entropy_floor(rows.centred, columns.to(rows.centred.dtype)))
