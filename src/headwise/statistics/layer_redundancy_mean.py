"""How alike a head's attention map is to those of the layer before, on average."""

from torch import Tensor

from headwise.statistics.reading import SiteFacts
from headwise.statistics.row_figures import RowFigures
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally


class LayerRedundancyMean(Statistic):
    """Averages, for each head, the cosines of its map with all maps of the layer before.

    Its mean over heads is the mean over all H×H' pairs, as Bhojanapalli et al. 2021, arXiv 2110.06821, average; `layer_redundancy`
    gives the best match instead. 1: all heads of both layers attend alike.
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
