"""How alike the tokens are that enter attention."""

from headwise.statistics.reading import SiteFacts
from headwise.statistics.row_figures import RowFigures
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally
from headwise.statistics.tokens import cosine


class TokenCosine(Statistic):
    """Averages the cosine between all pairs of different real tokens that enter attention.

    Where a norm stands before attention these are the normed tokens; `stream_cosine` reads the residual stream, as the paper's
    figure does (Wang et al. 2022, arXiv 2203.05962). A diagnosis, not a score of quality: models with a higher cosine and a lower
    loss exist (arXiv 2601.08131).
    """

    name = "token_cosine"
    unit = "cosine"
    reduction = "mean over pairs of tokens, then over samples"
    per = "layer"
    worse = "high"

    def applies(self, facts: SiteFacts) -> str | None:
        return None if facts.hidden else "the host does not show what enters the layer"

    def shape(self, heads: int, heads_before: int) -> tuple[int, ...]:
        return (1,)

    def tally(self, rows: RowFigures) -> Tally:
        return cosine(rows.reading, rows.reading.given(rows.reading.hidden))
