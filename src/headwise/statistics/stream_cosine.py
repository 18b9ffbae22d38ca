"""How alike the tokens of the residual stream are."""

from headwise.statistics.reading import SiteFacts
from headwise.statistics.row_figures import RowFigures
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally
from headwise.statistics.tokens import NO_STREAM, cosine


class StreamCosine(Statistic):
    """Averages the cosine between all pairs of different real tokens of the residual stream that enters the layer's block.

    The stream is what attention's branch is added to, before any norm of the block: the figure of Wang et al. 2022, arXiv
    2203.05962. `final_cosine` reads it behind the last block, `token_cosine` what enters attention itself.
    """

    name = "stream_cosine"
    unit = "cosine"
    reduction = "mean over pairs of tokens, then over samples"
    per = "layer"
    worse = "high"

    def applies(self, facts: SiteFacts) -> str | None:
        return None if facts.stream else facts.stream_obstacle or NO_STREAM

    def shape(self, heads: int, heads_before: int) -> tuple[int, ...]:
        return (1,)

    def tally(self, rows: RowFigures) -> Tally:
        return cosine(rows.reading, rows.reading.given(rows.reading.stream))
