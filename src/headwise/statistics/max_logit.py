"""The largest logit of a head."""

from headwise.statistics.row_figures import RowFigures
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally


class MaxLogit(Statistic):
    """Takes the largest logit that enters the softmax: scaled, soft-capped, with its bias, over allowed keys.

    Kimi K2 2025, arXiv 2507.20534 (QK-clip reads the same number). The logit of a learned sink is not a logit of a key and is
    left out. On a sample of the queries it is a lower bound, and its record is marked `sampled`.
    """

    name = "max_logit"
    unit = "nats"
    reduction = "maximum over real queries and allowed keys"
    needs = ("top",)
    worse = "high"

    def tally(self, rows: RowFigures) -> Tally:
        return rows.extremum(rows.top, "max")
