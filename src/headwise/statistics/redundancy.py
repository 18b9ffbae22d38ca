"""How alike attention maps are: between the heads of a layer, and between layers."""

import torch
from torch import Tensor

from headwise.statistics.reading import SiteFacts
from headwise.statistics.row_figures import RowFigures
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally


class HeadRedundancy(Statistic):
    """Averages the cosine of a head's flattened attention map with those of the other heads of its layer.

    Per sample ⟨A_h, A_g⟩ / (‖A_h‖‖A_g‖) over real queries, averaged over samples and the other heads; its mean over
    heads is the mean over pairs. 1: the heads attend alike. The inner products are a Gram matrix summed block by block.
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


class LayerRedundancy(Statistic):
    """Takes, for each head, the largest cosine of its map with a map of the layer before.

    All H×H' pairs are averaged over samples first; the best match is chosen then. 1: the layer repeats what the one
    before attended to; `layer_redundancy_mean` averages over all of them (Bhojanapalli et al. 2021, arXiv 2110.06821,
    reuse maps for this reason).
    """

    name = "layer_redundancy"
    unit = "cosine"
    reduction = "mean over samples, maximum over heads of the layer before"
    needs = ("crossing",)
    worse = "high"

    def applies(self, facts: SiteFacts) -> str | None:
        if facts.windowed:
            return "windows hold other tokens in the next layer"
        return None if facts.previous else "no layer before it attends from the same queries to as many keys"

    def shape(self, heads: int, heads_before: int) -> tuple[int, ...]:
        return (heads, heads_before)

    def tally(self, rows: RowFigures) -> Tally:
        return Tally.over_samples(rows.crossing.float(), rows.queries.sampled)

    def finish(self, tally: Tally) -> Tensor:
        return tally.value().amax(-1)


class LayerRedundancyMean(Statistic):
    """Averages, for each head, the cosines of its map with all maps of the layer before.

    Its mean over heads is the mean over all H×H' pairs, as Bhojanapalli et al. 2021, arXiv 2110.06821, average;
    `layer_redundancy` gives the best match instead. 1: all heads of both layers attend alike.
    """

    name = "layer_redundancy_mean"
    unit = "cosine"
    reduction = "mean over samples and heads of the layer before"
    needs = ("crossing",)
    worse = "high"

    def applies(self, facts: SiteFacts) -> str | None:
        if facts.windowed:
            return "windows hold other tokens in the next layer"
        return None if facts.previous else "no layer before it attends from the same queries to as many keys"

    def shape(self, heads: int, heads_before: int) -> tuple[int, ...]:
        return (heads, heads_before)

    def tally(self, rows: RowFigures) -> Tally:
        return Tally.over_samples(rows.crossing.float(), rows.queries.sampled)

    def finish(self, tally: Tally) -> Tensor:
        return tally.value().mean(-1)
