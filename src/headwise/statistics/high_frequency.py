"""How much of the tokens is not their mean."""

import torch

from headwise.statistics.reading import SiteFacts
from headwise.statistics.row_figures import Rows
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally


class HighFrequency(Statistic):
    """Divides ‖x − mean of tokens‖_F by ‖x‖_F for the real tokens that enter the layer.

    Wang et al. 2022, arXiv 2203.05962: attention is a low-pass filter, and this is what it lets through. 0: all tokens are the same.
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

    def tally(self, rows: Rows) -> Tally:
        x, real = rows.reading.tokens(), rows.reading.real_tokens
        mean = x.sum(1, keepdim=True) / real.sum(-1).clamp_min(1)[:, None, None]
        whole = torch.linalg.vector_norm(x, dim=(1, 2))
        about = x - mean
        if rows.reading.real_queries is not None:
            about = about * real[..., None]
        about = torch.linalg.vector_norm(about, dim=(1, 2))
        return Tally.over_samples(torch.where(whole > 0, about / whole, torch.nan)[:, None])
