"""The weight that the most attended key of a sequence receives."""

import torch

from headwise.statistics.row_figures import RowFigures
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally


class SinkMass(Statistic):
    """Takes max_j mean_i A_ij, the mean weight of the key that receives most, and averages it over samples.

    Attention sinks: Xiao et al. 2023, arXiv 2309.17453. 1/N is the least (no sink), 1 means every query looks at one key. On
    a sample of the queries it is the ratio of the sample, marked `sampled`.
    """

    name = "sink_mass"
    unit = "share of weight"
    reduction = "mean over samples"
    needs = ("columns",)
    worse = "high"

    def tally(self, rows: RowFigures) -> Tally:
        seen = rows.queries.valid.sum(-1) > 0
        heaviest = rows.columns.amax(-1)
        return Tally.over_samples(torch.where(seen, heaviest, torch.nan).float(), rows.queries.sampled)
