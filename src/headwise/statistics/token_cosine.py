"""How alike the tokens of a sequence are."""

import torch

from headwise.statistics.reading import SiteFacts
from headwise.statistics.row_figures import Rows
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally


class TokenCosine(Statistic):
    """Averages the cosine between all pairs of different real tokens that enter the layer.

    (‖Σ x̂_i‖² − T) / (T(T − 1)) in O(T·C). Wang et al. 2022, arXiv 2203.05962. A diagnosis, not a score of quality:
    models with a higher cosine and a lower loss exist (arXiv 2601.08131).
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

    def tally(self, rows: Rows) -> Tally:
        unit = torch.nn.functional.normalize(rows.reading.tokens(), dim=-1, eps=1e-30)
        together = unit.sum(1).square().sum(-1)
        # A token of zeros has no direction: it adds nothing to either sum.
        alone = torch.linalg.vector_norm(unit, dim=(1, 2)).square()
        count = rows.reading.real_tokens.sum(-1)
        cosine = (together - alone) / (count * (count - 1))
        return Tally.over_samples(torch.where(count > 1, cosine, torch.nan)[:, None])
