"""The weight of a learned sink: its mean, and how often it is near 0 or near 1."""

from headwise.health.statistics.statistic import RowFigures, Statistic, Tally

# What counts as closed, and 1 minus it as open.
CLOSED = 0.05
NO_SINK = "the layer has no learned sink"


class SinkWeight(Statistic):
    """Averages the weight that real queries give to the layer's learned sink, exp(b) / (exp(b) + Σ_j exp(s_ij)).

    gpt-oss, arXiv 2508.10925; Miller 2023, "Attention is off by one". It is what the layer does not write: near 1 the
    head is switched off. `sink_weight_growth` is its change since the first reading.
    """

    name = "sink_weight"
    unit = "share of weight"
    reduction = "mean over real queries with a key"
    needs = ("on_sink",)
    requires = ("sinks", NO_SINK)

    def tally(self, rows: RowFigures) -> Tally:
        return rows.mean(rows.on_sink)


class SinkClosed(Statistic):
    """Computes the share of real queries that give the learned sink less than 0.05 of their weight.

    At 1 the sink does nothing.
    """

    name = "sink_closed"
    unit = "share of queries"
    reduction = "mean over real queries with a key"
    needs = ("on_sink",)
    requires = ("sinks", NO_SINK)

    def tally(self, rows: RowFigures) -> Tally:
        return rows.mean((rows.on_sink < CLOSED).float())


class SinkOpen(Statistic):
    """Computes the share of real queries that give the learned sink more than 0.95 of their weight.

    At 1 the head is switched off.
    """

    name = "sink_open"
    unit = "share of queries"
    reduction = "mean over real queries with a key"
    needs = ("on_sink",)
    worse = "high"
    requires = ("sinks", NO_SINK)

    def tally(self, rows: RowFigures) -> Tally:
        return rows.mean((rows.on_sink > 1 - CLOSED).float())
