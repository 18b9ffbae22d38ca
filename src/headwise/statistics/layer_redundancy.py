"""How alike a head's attention map is to the best match in the layer before."""

from torch import Tensor

from headwise.statistics.reading import SiteFacts
from headwise.statistics.row_figures import RowFigures
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally


class LayerRedundancy(Statistic):
    """Takes, for each head, the largest cosine of its map with a map of the layer before.

    All H×H' pairs are averaged over samples first; the best match is chosen then. 1: the layer repeats what the one before attended
    to; `layer_redundancy_mean` averages over all of them (Bhojanapalli et al. 2021, arXiv 2110.06821, reuse maps for this reason).
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
