"""The norms of queries, keys, values and the outputs of heads."""

from torch import Tensor

from headwise.health.statistics.statistic import RowFigures, Statistic, Tally
from headwise.numerics.precision import norms


class QueryNorm(Statistic):
    """Averages ‖q_i‖₂ over real queries, after any rotary positions or norm of the host.

    Always computed from all queries. Together with `key_norm` it bounds the logits; when training diverges, both grow
    before the logits do (Dehghani et al. 2023, arXiv 2302.05442).
    """

    name = "query_norm"
    unit = "units of q"
    reduction = "mean over real queries with a key"

    def tally(self, rows: RowFigures) -> Tally:
        norm = rows.reading.query_norms.masked_fill(rows.queries.invalid, 0)
        return Tally(norm.sum((0, 2)), rows.queries.every_weight.expand(norm.shape[1]))


class KeyNorm(Statistic):
    """Averages ‖k_j‖₂ over the keys that a real query may see.

    Always computed from all keys. Heads that share keys have the same figure unless their masks differ. Dehghani et al.
    2023, arXiv 2302.05442.
    """

    name = "key_norm"
    unit = "units of k"
    reduction = "mean over keys that a real query may see"

    def tally(self, rows: RowFigures) -> Tally:
        return _over_seen(rows, rows.reading.key_norms)


class ValueNorm(Statistic):
    """Averages ‖v_j‖₂ over the tokens whose keys a real query may see.

    Always computed from all tokens. A first token with a large key and a value near zero is an attention sink (Guo et
    al. 2024, arXiv 2410.13835).
    """

    name = "value_norm"
    unit = "units of v"
    reduction = "mean over keys that a real query may see"

    def tally(self, rows: RowFigures) -> Tally:
        return _over_seen(rows, norms(rows.reading.v))


def _over_seen(rows: RowFigures, norms: Tensor) -> Tally:
    """Return the mean of the norms (B,H|Hkv,N) over the keys that each head sees."""
    reading = rows.reading
    if norms.shape[1] < reading.heads:
        norms = norms.repeat_interleave(reading.heads // norms.shape[1], 1)
    unseen, count = reading.keys_unseen
    # Keys that no query sees may hold any value.
    return Tally(norms.masked_fill(unseen, 0).sum((0, 2)), count.expand(reading.heads))


class OutputNorm(Statistic):
    """Averages ‖o_i‖₂ of each head over real queries, before the output projection.

    Always computed from all queries. A head whose norm is far below the others of its layer is dead or switched off
    (Michel et al. 2019, arXiv 1905.10650).
    """

    name = "output_norm"
    unit = "units of v"
    reduction = "mean over real queries with a key"
    requires = ("output", "the host does not show the output of each head")

    def tally(self, rows: RowFigures) -> Tally:
        output = rows.reading.output
        assert output is not None
        norm = norms(output).masked_fill(rows.queries.invalid, 0)
        return Tally(norm.sum((0, 2)), rows.queries.every_weight.expand(norm.shape[1]))
