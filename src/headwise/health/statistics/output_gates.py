"""The learned gates of the heads' output: their mean, and how often they are near 0 or near 1."""

from torch import Tensor

from headwise.health.statistics.learned_sinks import CLOSED
from headwise.health.statistics.statistic import RowFigures, Statistic, Tally

NO_GATE = "no method gates the output of the heads, and a host's own gate is not seen"


class GateMean(Statistic):
    """Averages the sigmoid gates of a head's output over real queries, and over channels if each has its own.

    Qiu et al. 2025, arXiv 2505.06708, who report 0.12 in a trained model. The gates are those of `GatedOutput`, as the
    sigmoid gives them: with `start="one"` the output is multiplied by twice as much. Always computed from all queries.
    `gate_mean_growth` is its change since the first reading.
    """

    name = "gate_mean"
    unit = "gate"
    reduction = "mean over real queries with a key and channels"
    requires = ("gate", NO_GATE)

    def tally(self, rows: RowFigures) -> Tally:
        return _mean(rows, rows.reading.given(rows.reading.gate).float())


class GateClosed(Statistic):
    """Computes the share of the gates of a head's output that are below 0.05, over real queries and channels.

    At 1 the head is switched off.
    """

    name = "gate_closed"
    unit = "share of gates"
    reduction = "mean over real queries with a key and channels"
    worse = "high"
    requires = ("gate", NO_GATE)

    def tally(self, rows: RowFigures) -> Tally:
        return _mean(rows, (rows.reading.given(rows.reading.gate) < CLOSED).float())


class GateOpen(Statistic):
    """Computes the share of the gates of a head's output that are above 0.95, over real queries and channels.

    At 1 the gate does nothing.
    """

    name = "gate_open"
    unit = "share of gates"
    reduction = "mean over real queries with a key and channels"
    requires = ("gate", NO_GATE)

    def tally(self, rows: RowFigures) -> Tally:
        return _mean(rows, (rows.reading.given(rows.reading.gate) > 1 - CLOSED).float())


def _mean(rows: RowFigures, gates: Tensor) -> Tally:
    """Return the mean of gates (B, H, T, 1|Dv) over channels and real queries."""
    values = gates.mean(-1).masked_fill(rows.queries.invalid, 0)
    return Tally(values.sum((0, 2)), rows.queries.every_weight.expand(values.shape[1]))
