"""How much of the tokens that enter attention is not their mean."""

from headwise.statistics.reading import SiteFacts
from headwise.statistics.row_figures import RowFigures
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally
from headwise.statistics.tokens import share_about_the_mean


class HighFrequency(Statistic):
    """Divides ‖x − mean of tokens‖_F by ‖x‖_F for the real tokens that enter attention.

    Where a norm stands before attention these are the normed tokens; `stream_high_frequency` reads the residual stream. Wang et al.
    2022, arXiv 2203.05962: attention is a low-pass filter, and this is what it lets through. 0: all tokens are the same.
    """

    name = "high_frequency"
    unit = "ratio"
    reduction = "mean over samples"
    per = "layer"
    worse = "low"

    def applies(self, facts: SiteFacts) -> str | None:
        return None if facts.hidden else "the host does not show what enters the layer"

    def shape(self, heads: int, heads_before: int) -> tuple[int, ...]:
        return (1,)

    def tally(self, rows: RowFigures) -> Tally:
        return share_about_the_mean(rows.reading, rows.reading.given(rows.reading.hidden))
