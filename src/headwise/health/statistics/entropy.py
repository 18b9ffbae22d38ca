"""Entropy of attention: how many keys a query attends to, and lower bounds of it."""

import torch
from torch import Tensor

from headwise.health.statistics.squarings import largest_square
from headwise.health.statistics.statistic import RowFigures, SiteFacts, Statistic, Tally
from headwise.numerics.precision import magnitude


class AttentionEntropy(Statistic):
    """Averages H_i = −Σ_j A_ij log A_ij over real queries.

    Zhai et al. 2023, arXiv 2303.06296. A is the softmax before dropout, with a learned sink as an additional column.
    Computed as log Z − Σ e^D·D / Z with D = s − max, which stays accurate to 1e-7 nats when the entropy collapses.
    """

    name = "attention_entropy"
    unit = "nats"
    reduction = "mean over real queries with a key"
    needs = ("entropy",)
    worse = "low"

    def tally(self, rows: RowFigures) -> Tally:
        return rows.mean(rows.entropy)


class EntropyShare(Statistic):
    """Averages H_i / log(allowed keys of row i) over real queries: 1 is uniform attention, 0 is one key.

    The range of entropy differs between the rows of a causal or padded call, so each row is divided by its own. A query
    with one key has no range and is left out; a learned sink counts as a key.
    """

    name = "entropy_share"
    unit = "share of log(keys)"
    reduction = "mean over real queries with at least two keys"
    needs = ("entropy",)
    worse = "low"

    def tally(self, rows: RowFigures) -> Tally:
        columns = (rows.queries.counts + rows.columns_of_softmax).clamp_min(2)
        return rows.mean(rows.entropy / columns.log(), least=2)


class LowestEntropy(Statistic):
    """Finds the smallest row entropy of each head, in nats.

    Queries with one key always have entropy 0 and are left out. On a sample of the queries it is only an upper bound of
    the true minimum, and its record is marked `sampled`.
    """

    name = "lowest_entropy"
    unit = "nats"
    reduction = "minimum over real queries with at least two keys"
    needs = ("entropy",)

    def tally(self, rows: RowFigures) -> Tally:
        return rows.extremum(rows.entropy, "min", least=2)


# The size of a row of logits, in nats, above which its floor is 0 in every dtype.
LARGEST_SIZE = 1e4


def entropy_floor(size: Tensor, keys: Tensor) -> Tensor:
    """Return the minimum of the entropy (nats) of softmax(a) over ‖a‖₂ ≤ size with `keys` entries; 0 for one key.

    Theorem 3.1 of Zhai et al. 2023, arXiv 2303.06296: with β = exp(−σ√(T/(T−1))), log(1 + (T−1)β) + σ√(T(T−1))β / (1 +
    (T−1)β).
    """
    several = keys > 1
    keys = keys.clamp_min(2)
    # Its exponential is 0 long before, and an infinite size times that 0 would be NaN.
    size = size.clamp_max(LARGEST_SIZE)
    beta = torch.exp(-size * (keys / (keys - 1)).sqrt())
    rest = (keys - 1) * beta
    floor = torch.log1p(rest) + size * (keys * (keys - 1)).sqrt() * beta / (1 + rest)
    return torch.where(several, floor, 0.0)


def largest_eigenvalue(gram: Tensor) -> Tensor:
    """Return the largest eigenvalue of each symmetric matrix, NaN for a matrix that is not finite."""
    finite = gram.isfinite().all(-1).all(-1)
    values = torch.linalg.eigvalsh(torch.where(finite[..., None, None], gram, 0.0))
    return torch.where(finite, values[..., -1], torch.nan)


class EntropyFloorCentred(Statistic):
    """Averages over real queries the floor of Theorem 3.1 at σ_i = ‖a_i − ā_i‖, the row's logits about their mean.

    Zhai et al. 2023, arXiv 2303.06296. The softmax ignores the mean of a row, so the centred norm can replace the
    spectral one and gives a much tighter bound. Row i counts its own allowed keys, so causal and masked calls use the
    causal form; without a mask the norm is computed from sums over keys only. A row with one key has floor 0.
    """

    name = "entropy_floor_centred"
    unit = "nats"
    reduction = "mean over real queries with a key"
    needs = ("centred",)

    def tally(self, rows: RowFigures) -> Tally:
        columns = rows.queries.counts + rows.columns_of_softmax
        return rows.mean(entropy_floor(rows.centred, columns.to(rows.centred.dtype)))


# Gram matrices up to this size are decomposed; for larger ones the Frobenius norm is used, a looser valid bound.
LARGEST_GRAM = 1024


def largest_of_gram(x: Tensor) -> Tensor:
    """Return ‖X Xᵀ‖₂ (B,) of tokens x (B,T,C) with entries of size 1, or what bounds it where it would take long."""
    if x.device.type == "cuda":
        return largest_square(x)
    gram = torch.bmm(x, x.transpose(1, 2)) if x.shape[1] <= x.shape[2] else torch.bmm(x.transpose(1, 2), x)
    return largest_eigenvalue(gram) if gram.shape[-1] <= LARGEST_GRAM else torch.linalg.matrix_norm(gram)


class EntropyFloorSpectral(Statistic):
    """Averages the floor of Theorem 3.1 at σ = scale · ‖W_K W_Qᵀ‖₂ · ‖X Xᵀ‖₂ over real queries, X the real tokens.

    Zhai et al. 2023, arXiv 2303.06296. Causal and masked rows count their own keys. This is the theorem's own form, for
    comparison with the centred one; at realistic sizes it is almost vacuous. It needs logits that are exactly
    scale · x_i W_Qᵀ W_K x_j.
    """

    name = "entropy_floor_spectral"
    unit = "nats"
    reduction = "mean over real queries with a key"

    def applies(self, facts: SiteFacts) -> str | None:
        if not facts.self_attention:
            return "the theorem is about one sequence that attends to itself"
        if facts.product_obstacle is not None:
            return f"logits are not x W_Qᵀ W_K x: {facts.product_obstacle}"
        if facts.bias or facts.sinks:
            return "logits are not x W_Qᵀ W_K x: " + ("a bias is added" if facts.bias else "a learned sink is added")
        if not facts.hidden:
            return "the host does not show what enters the layer"
        return None if facts.product_norm else "the query and key weights of the heads were not found"

    def tally(self, rows: RowFigures) -> Tally:
        reading, queries = rows.reading, rows.queries
        x = reading.without_padding(reading.given(reading.hidden))
        unit = magnitude(x, (1, 2))
        largest = largest_of_gram(x / unit)
        # In this order, weights of norm 0 stay 0 when the squares of the tokens overflow.
        size = abs(reading.factor) * reading.given(reading.product_norm).float() * unit[:, 0] * largest[:, None]
        size = size * unit[:, 0]
        return queries.mean(entropy_floor(size[..., None], queries.counts.expand(reading.batch, reading.heads, -1)))
