"""The key with the largest logit of each query: how far away it is, and how many queries have the same."""

import torch

from headwise.health.statistics.statistic import RowFigures, Statistic, Tally


class TopKeyDistance(Statistic):
    """Averages |i − argmax_j s_ij| over real queries, in tokens of the sequence as the layer sees it.

    0 is a head whose queries prefer themselves, 1 one that reads the token before (Voita et al. 2019, arXiv
    1905.09418); `attention_distance` averages over all weight instead. Of several largest logits the first counts. Read
    only if it is named: it needs another pass over the logits.
    """

    name = "top_key_distance"
    unit = "tokens"
    reduction = "mean over real queries with a key"
    needs = ("top_key",)
    usual = False
    requires = ("self_attention", "queries and keys are different tokens, with no distance between them")

    def tally(self, rows: RowFigures) -> Tally:
        positions = rows.queries.positions[:, None]
        return rows.mean((rows.top_key - positions.to(rows.top_key.dtype)).abs())


class TopKeyShare(Statistic):
    """Computes the share of a sample's real queries that have the same key as argmax_j s_ij, the most frequent one.

    The count of an attention sink (Gu et al. 2024, arXiv 2410.10781, count queries by a threshold of weight instead):
    1 means that all queries prefer one key. With sampled queries it is that of the sample, and its record is marked
    `sampled`. Read only if it is named: it needs another pass over the logits.
    """

    name = "top_key_share"
    unit = "share of queries"
    reduction = "mean over samples"
    needs = ("top_key",)
    worse = "high"
    usual = False

    def tally(self, rows: RowFigures) -> Tally:
        valid = rows.queries.valid.expand(rows.top_key.shape)
        counts = torch.zeros(*valid.shape[:2], rows.reading.keys, device=valid.device, dtype=torch.float32)
        # Rows that do not count may hold any position.
        place = torch.where(valid > 0, rows.top_key, 0).long()
        most = counts.scatter_add_(2, place, valid.to(counts.dtype)).amax(-1)
        number = valid.sum(-1)
        return Tally.over_samples(torch.where(number > 0, most / number, torch.nan), rows.queries.sampled)
