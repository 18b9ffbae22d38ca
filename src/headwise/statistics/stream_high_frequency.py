"""How much of the residual stream is not the mean of its tokens."""

from headwise.statistics.reading import SiteFacts
from headwise.statistics.row_figures import RowFigures
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally
from headwise.statistics.tokens import NO_STREAM, share_about_the_mean


class StreamHighFrequency(Statistic):
    """Divides ‖x − mean of tokens‖_F by ‖x‖_F for the real tokens of the residual stream that enters the layer's block.

    Wang et al. 2022, arXiv 2203.05962. `final_high_frequency` reads it behind the last block, `high_frequency` what enters attention
    itself.
    """

    name = "stream_high_frequency"
    unit = "ratio"
    reduction = "mean over samples"
    per = "layer"
    worse = "low"

    def applies(self, facts: SiteFacts) -> str | None:
        return None if facts.stream else facts.stream_obstacle or NO_STREAM

    def shape(self, heads: int, heads_before: int) -> tuple[int, ...]:
        return (1,)

    def tally(self, rows: RowFigures) -> Tally:
        return share_about_the_mean(rows.reading, rows.reading.given(rows.reading.stream))
