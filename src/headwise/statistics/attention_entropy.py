"""Attention entropy per head, in nats."""

from headwise.statistics.row_figures import RowFigures
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally


class AttentionEntropy(Statistic):
    """Averages H_i = −Σ_j A_ij log A_ij over real queries.

    Zhai et al. 2023, arXiv 2303.06296. A is the softmax before dropout; a learned sink counts as one more column, since its mass is
    part of the softmax. Computed as log Z − Σ e^D·D / Z with D = s − max, which keeps its digits when entropy collapses.
    """

    name = "attention_entropy"
    unit = "nats"
    reduction = "mean over real queries with a key"
    needs = ("entropy",)
    worse = "low"

    def tally(self, rows: RowFigures) -> Tally:
        return rows.mean(rows.entropy)
