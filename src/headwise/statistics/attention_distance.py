"""How far a head looks."""

from headwise.statistics.reading import SiteFacts
from headwise.statistics.row_figures import RowFigures
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally


class AttentionDistance(Statistic):
    """Averages Σ_j A_ij |i − j| over real queries, in tokens of the sequence as the layer sees it.

    Dosovitskiy et al. 2021, arXiv 2010.11929, for images: here patches are counted in the order of the sequence, a class token
    included, because a site does not know its grid. The weight of a learned sink is left out and the rest counts as one.
    """

    name = "attention_distance"
    unit = "tokens"
    reduction = "mean over real queries with a key"
    needs = ("distance",)

    def applies(self, facts: SiteFacts) -> str | None:
        return None if facts.self_attention else "queries and keys are different tokens, with no distance between them"

    def tally(self, rows: RowFigures) -> Tally:
        return rows.mean(rows.distance)
