"""How much of what leaves the last block is not the mean of its tokens."""

from headwise.statistics.reading import SiteFacts
from headwise.statistics.row_figures import RowFigures
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally
from headwise.statistics.tokens import NO_STREAM, share_about_the_mean


class FinalHighFrequency(Statistic):
    """Divides ‖x − mean of tokens‖_F by ‖x‖_F for the real tokens that leave the last block of a stack.

    The end of the curve that `stream_high_frequency` draws, before any norm behind the stack: Wang et al. 2022, arXiv 2203.05962.
    """

    name = "final_high_frequency"
    unit = "ratio"
    reduction = "mean over samples"
    per = "layer"
    worse = "low"

    def applies(self, facts: SiteFacts) -> str | None:
        return None if facts.final else facts.stream_obstacle or NO_STREAM

    def shape(self, heads: int, heads_before: int) -> tuple[int, ...]:
        return (1,)

    def tally(self, rows: RowFigures) -> Tally:
        return share_about_the_mean(rows.reading, rows.reading.given(rows.reading.final))
