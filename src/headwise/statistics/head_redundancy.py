"""How alike the attention maps of the heads of one layer are."""

import torch

from headwise.statistics.reading import SiteFacts
from headwise.statistics.row_figures import RowFigures
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally


class HeadRedundancy(Statistic):
    """Averages the cosine of a head's flattened attention map with those of the other heads of its layer.

    Per sample ⟨A_h, A_g⟩ / (‖A_h‖‖A_g‖) over real queries, averaged over samples and the other heads; its mean over heads is the mean
    over pairs. 1: the heads attend alike. The inner products are a Gram matrix summed block by block.
    """

    name = "head_redundancy"
    unit = "cosine"
    reduction = "mean over samples and other heads"
    needs = ("gram",)
    worse = "high"

    def applies(self, facts: SiteFacts) -> str | None:
        return "the layer has one head, which has no pair" if facts.heads < 2 else None

    def tally(self, rows: RowFigures) -> Tally:
        size = rows.gram.diagonal(dim1=1, dim2=2).sqrt()
        cosine = rows.gram / (size[:, :, None] * size[:, None])
        others = (cosine.sum(-1) - cosine.diagonal(dim1=1, dim2=2)) / (rows.reading.heads - 1)
        return Tally.over_samples(torch.where(size > 0, others, torch.nan).float(), rows.queries.sampled)
