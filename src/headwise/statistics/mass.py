"""Where the mass of attention lies: on sinks, on single keys, and how far away."""

import torch

from headwise.statistics.reading import SiteFacts
from headwise.statistics.row_figures import RowFigures
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally


class SinkMass(Statistic):
    """Takes max_j mean_i A_ij, the mean weight of the key that receives most, and averages it over samples.

    Attention sinks: Xiao et al. 2023, arXiv 2309.17453. 1/N is the least (no sink), 1 means every query looks at one
    key. On a sample of the queries it is the ratio of the sample, marked `sampled`.
    """

    name = "sink_mass"
    unit = "share of weight"
    reduction = "mean over samples"
    needs = ("columns",)
    worse = "high"

    def tally(self, rows: RowFigures) -> Tally:
        seen = rows.queries.valid.sum(-1) > 0
        heaviest = rows.columns.amax(-1)
        return Tally.over_samples(torch.where(seen, heaviest, torch.nan).float(), rows.queries.sampled)


PEAK = 0.9


class PeakedRows(Statistic):
    """Counts the real queries whose largest weight exceeds 0.9, as a share.

    A query with one key looks at it by construction and is left out, unless a learned sink competes with the key.
    """

    name = "peaked_rows"
    unit = "share of queries"
    reduction = "mean over real queries with at least two keys"
    needs = ("peak",)
    worse = "high"

    def tally(self, rows: RowFigures) -> Tally:
        return rows.mean((rows.peak > PEAK).float(), least=2)


class AttentionDistance(Statistic):
    """Averages Σ_j A_ij |i − j| over real queries, in tokens of the sequence as the layer sees it.

    Dosovitskiy et al. 2021, arXiv 2010.11929, for images: here patches are counted in the order of the sequence, a
    class token included, because a site does not know its grid. The weight of a learned sink is left out and the rest
    counts as one.
    """

    name = "attention_distance"
    unit = "tokens"
    reduction = "mean over real queries with a key"
    needs = ("distance",)

    def applies(self, facts: SiteFacts) -> str | None:
        return None if facts.self_attention else "queries and keys are different tokens, with no distance between them"

    def tally(self, rows: RowFigures) -> Tally:
        return rows.mean(rows.distance)
