"""What the branches of a block write, relative to the residual stream that enters the block."""

import torch
from torch import Tensor

from headwise.health.statistics.reading import Reading
from headwise.health.statistics.similarity import NO_STREAM
from headwise.health.statistics.statistic import OfLayer, RowFigures, SiteFacts, Tally
from headwise.numerics.precision import norms

NOT_SHOWN = "the host does not show what the branch adds to the residual stream"


def missing(facts: SiteFacts, name: str) -> str:
    """Return the reason why what a branch writes is not read."""
    no_stream = "" if facts.stream else facts.stream_obstacle or NO_STREAM
    return facts.write_obstacles.get(name) or no_stream or NOT_SHOWN


def relative_size(reading: Reading, written: Tensor) -> Tally:
    """Return the mean of ‖w_i‖ / ‖x_i‖ over real tokens of w (B,T,C) and of the stream x; tokens of 0 are left out."""
    size, stream = norms(written), norms(reading.given(reading.stream))
    counted = (reading.real_of(written) > 0) & (stream != 0)
    ratio = torch.where(counted, size / torch.where(stream == 0, 1, stream), 0)
    return Tally(ratio.sum()[None].float(), counted.sum()[None].float())


class AttentionWrite(OfLayer):
    """Averages ‖a_i‖ / ‖x_i‖ over real tokens: what attention adds to a token over the stream that enters the block.

    Read where the branch enters the sum, after its dropout and norms and before a LayerScale. A branch that writes less
    and less is bypassed, and one that writes many times the stream rewrites it (Gromov et al. 2024, arXiv 2403.17887,
    and Sun et al. 2025, arXiv 2502.05795, on deep layers that do nothing). Read only if it is named, because it hooks
    two more modules of each block.
    """

    name = "attention_write"
    unit = "share of the stream"
    reduction = "mean over real tokens"
    usual = False

    def applies(self, facts: SiteFacts) -> str | None:
        return None if facts.attention_write else missing(facts, self.name)

    def tally(self, rows: RowFigures) -> Tally:
        return relative_size(rows.reading, rows.reading.given(rows.reading.attention_write))


class MLPWrite(OfLayer):
    """Averages ‖m_i‖ / ‖x_i‖ over real tokens: what the MLP adds to a token over the stream that enters the block.

    The same as `attention_write` for the other branch of the block, of the same stream. Read only if it is named.
    """

    name = "mlp_write"
    unit = "share of the stream"
    reduction = "mean over real tokens"
    usual = False

    def applies(self, facts: SiteFacts) -> str | None:
        return None if facts.mlp_write else missing(facts, self.name)

    def tally(self, rows: RowFigures) -> Tally:
        return relative_size(rows.reading, rows.reading.given(rows.reading.mlp_write))
