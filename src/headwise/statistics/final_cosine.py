"""How alike the tokens are that leave the last block."""

from headwise.statistics.reading import SiteFacts
from headwise.statistics.row_figures import RowFigures
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally
from headwise.statistics.tokens import NO_STREAM, cosine


class FinalCosine(Statistic):
    """Averages the cosine between all pairs of different real tokens that leave the last block of a stack.

    The end of the curve that `stream_cosine` draws, before any norm behind the stack: Wang et al. 2022, arXiv 2203.05962. Read at
    the last attention layer alone: what leaves another block enters the next one.
    """

    name = "final_cosine"
    unit = "cosine"
    reduction = "mean over pairs of tokens, then over samples"
    per = "layer"
    worse = "high"

    def applies(self, facts: SiteFacts) -> str | None:
        return None if facts.final else facts.stream_obstacle or NO_STREAM

    def shape(self, heads: int, heads_before: int) -> tuple[int, ...]:
        return (1,)

    def tally(self, rows: RowFigures) -> Tally:
        return cosine(rows.reading, rows.reading.given(rows.reading.final))
