"""How alike tokens are: after attention, in the residual stream, and behind the last block."""

import torch
from torch import Tensor

from headwise.statistics.reading import Reading, SiteFacts
from headwise.statistics.row_figures import RowFigures
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally

NO_STREAM = "the host does not show the residual stream"


def cosine(reading: Reading, tokens: Tensor) -> Tally:
    """Averages the cosine between all pairs of different real tokens (B,T,C): (‖Σ x̂_i‖² − T) / (T(T − 1)), in
    O(T·C)."""
    unit = torch.nn.functional.normalize(reading.without_padding(tokens), dim=-1, eps=1e-30)
    together = unit.sum(1).square().sum(-1)
    # A token of zeros has no direction: it adds nothing to either sum.
    alone = torch.linalg.vector_norm(unit, dim=(1, 2)).square()
    count = reading.real_of(tokens).sum(-1)
    found = (together - alone) / (count * (count - 1))
    return Tally.over_samples(torch.where(count > 1, found, torch.nan)[:, None])


def share_about_the_mean(reading: Reading, tokens: Tensor) -> Tally:
    """Divides ‖x − mean of tokens‖_F by ‖x‖_F for the real tokens (B,T,C)."""
    x, real = reading.without_padding(tokens), reading.real_of(tokens)
    mean = x.sum(1, keepdim=True) / real.sum(-1).clamp_min(1)[:, None, None]
    whole = torch.linalg.vector_norm(x, dim=(1, 2))
    about = x - mean
    if reading.real_queries is not None:
        about = about * real[..., None]
    about = torch.linalg.vector_norm(about, dim=(1, 2))
    return Tally.over_samples(torch.where(whole > 0, about / whole, torch.nan)[:, None])


class TokenCosine(Statistic):
    """Averages the cosine between all pairs of different real tokens that enter attention.

    Where a norm stands before attention these are the normed tokens; `stream_cosine` reads the residual stream, as the
    paper's figure does (Wang et al. 2022, arXiv 2203.05962). A diagnosis, not a score of quality: models with a higher
    cosine and a lower loss exist (arXiv 2601.08131).
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


class HighFrequency(Statistic):
    """Divides ‖x − mean of tokens‖_F by ‖x‖_F for the real tokens that enter attention.

    Where a norm stands before attention these are the normed tokens; `stream_high_frequency` reads the residual stream.
    Wang et al. 2022, arXiv 2203.05962: attention is a low-pass filter, and this is what it lets through. 0: all tokens
    are the same.
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


class StreamCosine(Statistic):
    """Averages the cosine between all pairs of different real tokens of the residual stream that enters the layer's
    block.

    The stream is what attention's branch is added to, before any norm of the block: the figure of Wang et al. 2022,
    arXiv 2203.05962. `final_cosine` reads it behind the last block, `token_cosine` what enters attention itself.
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


class StreamHighFrequency(Statistic):
    """Divides ‖x − mean of tokens‖_F by ‖x‖_F for the real tokens of the residual stream that enters the layer's block.

    Wang et al. 2022, arXiv 2203.05962. `final_high_frequency` reads it behind the last block, `high_frequency` what
    enters attention itself.
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


class FinalCosine(Statistic):
    """Averages the cosine between all pairs of different real tokens that leave the last block of a stack.

    The end of the curve that `stream_cosine` draws, before any norm behind the stack: Wang et al. 2022, arXiv
    2203.05962. Read at the last attention layer alone: what leaves another block enters the next one.
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


class FinalHighFrequency(Statistic):
    """Divides ‖x − mean of tokens‖_F by ‖x‖_F for the real tokens that leave the last block of a stack.

    The end of the curve that `stream_high_frequency` draws, before any norm behind the stack: Wang et al. 2022, arXiv
    2203.05962.
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
