"""Logits of attention: the largest and the smallest one, and a bound that needs no matrix."""

import torch

from headwise.health.statistics.statistic import RowFigures, Statistic, Tally


class MaxLogit(Statistic):
    """Finds the largest logit that enters the softmax: scaled, soft-capped, with its bias, over allowed keys.

    Kimi K2 2025, arXiv 2507.20534 (QK-clip uses the same number). The logit of a learned sink is left out. On a sample
    of the queries it is a lower bound, and its record is marked `sampled`.
    """

    name = "max_logit"
    unit = "nats"
    reduction = "maximum over real queries and allowed keys"
    needs = ("top",)
    worse = "high"

    def tally(self, rows: RowFigures) -> Tally:
        return rows.extremum(rows.top, "max")


class MinLogit(Statistic):
    """Finds the smallest logit that enters the softmax: scaled, soft-capped, with its bias, over allowed keys.

    Beside `max_logit`, it shows whether logits grow apart or only drift, as `log_sum_exp` shows
    otherwise. A key with an additive mask above -9,000 counts as allowed. On a sample of the queries it is an upper
    bound, and its record is marked `sampled`. Read only if it is named: it needs another pass over the logits.
    """

    name = "min_logit"
    unit = "nats"
    reduction = "minimum over real queries and allowed keys"
    needs = ("lowest",)
    worse = "low"
    usual = False

    def tally(self, rows: RowFigures) -> Tally:
        return rows.extremum(rows.lowest, "min")


class LogitBound(Statistic):
    """Computes scale · max‖q‖ · max‖k‖ over the real queries and keys of each sample.

    By Cauchy and Schwarz, no logit exceeds it before a bias is added. A key that no real query may see is left out. It
    reads O(T·d) numbers, so it is always computed from all queries.
    """

    name = "logit_bound"
    unit = "nats"
    reduction = "maximum over samples"
    worse = "high"

    def tally(self, rows: RowFigures) -> Tally:
        reading = rows.reading
        q = reading.query_norms.masked_fill(rows.queries.invalid, -torch.inf).amax(-1)
        keys = reading.key_norms.repeat_interleave(reading.heads // reading.k.shape[1], 1)
        if reading.mask is not None or reading.real_queries is not None:
            keys = keys.masked_fill(reading.keys_unseen[0], 0.0)
        bound = torch.where(q >= 0, q * keys.amax(-1) * abs(reading.factor), -torch.inf)
        return Tally.extremum(bound.amax(0), "max", False)
