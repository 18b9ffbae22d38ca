"""How much a head says."""

import torch

from headwise.core.precision import norms
from headwise.statistics.reading import SiteFacts
from headwise.statistics.row_figures import RowFigures
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally


class OutputNorm(Statistic):
    """Averages ‖o_i‖₂ of each head over real queries, before the output projection.

    Always in full. A head whose norm is far below the others of its layer is dead or switched off (Michel et al. 2019,
    arXiv 1905.10650).
    """

    name = "output_norm"
    unit = "units of v"
    reduction = "mean over real queries with a key"

    def applies(self, facts: SiteFacts) -> str | None:
        return None if facts.output else "the host does not show the output of each head"

    def tally(self, rows: RowFigures) -> Tally:
        valid, output = rows.queries.every_valid, rows.reading.output
        assert output is not None
        norm = torch.where(valid > 0, norms(output), 0)
        return Tally(norm.sum((0, 2)), valid.sum((0, 2)).expand(norm.shape[1]).clone())
