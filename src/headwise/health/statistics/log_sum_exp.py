"""The log-sum-exp of the logits: its mean and its largest value."""

from headwise.health.statistics.statistic import RowFigures, Statistic, Tally


class LogSumExp(Statistic):
    """Averages log Σ_j exp(s_ij) over real queries, with a learned sink among the columns.

    The quantity that z-loss penalises (Chowdhery et al. 2022, arXiv 2204.02311, there of the output logits): the
    softmax does not see it, and nothing holds it. Where it drifts away from 0 while the entropy stays, the logits move
    together, and half precision loses their differences. `log_sum_exp_drift` is its change since the first reading.
    """

    name = "log_sum_exp"
    unit = "nats"
    reduction = "mean over real queries with a key"
    needs = ("lse",)

    def tally(self, rows: RowFigures) -> Tally:
        return rows.mean(rows.lse)


class LargestLogSumExp(Statistic):
    """Finds the largest log Σ_j exp(s_ij) of each head, with a learned sink among the columns.

    At most log(keys) above `max_logit`, if no learned sink is larger, so that it is read only if it is named. On a
    sample of the queries it is a lower bound, and its record is marked `sampled`.
    """

    name = "largest_log_sum_exp"
    unit = "nats"
    reduction = "maximum over real queries with a key"
    needs = ("lse",)
    worse = "high"
    usual = False

    def tally(self, rows: RowFigures) -> Tally:
        return rows.extremum(rows.lse, "max")
