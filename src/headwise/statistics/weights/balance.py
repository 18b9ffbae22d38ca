"""How far the factors of a product are from the balance that weight decay leaves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.statistics.weights.product import Product
from headwise.statistics.weights.weight_statistic import WeightStatistic, unbalanced


class Imbalance(WeightStatistic):
    """Gives ‖Σ_h P_hᵀP_h − W_VW_Vᵀ‖_F (and the same for queries and keys) as a share of the two norms' sum, between 0
    and 1.

    Kobayashi et al. 2024, arXiv 2410.23819: weight decay λ lets the difference vanish as e^{−2λt}, so that a small
    share says that decay has acted long enough for the law; the sum runs over the heads of a group. With rotary
    positions queries and keys balance only in the traces of rotary pairs: those are compared.
    """

    name = "imbalance"
    unit = "share"
    per = "group"

    def applies(self, product: Product) -> str | None:
        return unbalanced(product)

    def of(self, product: Product) -> Tensor:
        own, shared = conserved(product)
        size = _norm(own) + _norm(shared)
        return _norm(own - shared) / size.clamp(min=1e-30)


def conserved(product: Product) -> tuple[Tensor, Tensor]:
    """Return what gradient flow without decay keeps the difference of: Gram matrices (G, d, d), or traces (G, pairs)
    with rotation."""
    if product.pairs is None:
        return product.own_gram, product.shared_gram
    once = (product.pairs[:, 0] != product.pairs[:, 1]).to(product.own)
    traces = []
    for gram in (product.own_gram, product.shared_gram):
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        traces.append(diagonal[:, product.pairs[:, 0]] + once * diagonal[:, product.pairs[:, 1]])
    return traces[0], traces[1]


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.flatten(1), dim=-1)


@dataclass(frozen=True, eq=False)
class Balance:
    """What weight decay makes equal, of each group of heads that share keys and values.

    Kobayashi et al. 2024, arXiv 2410.23819, compare them in pretrained models: rows of W_Q with those of W_K, columns
    of P with rows of W_V, and both norms of every head.

    Attributes:
        own: (G, d) norms of the rows of queries or output, over all heads of a group; (G, pairs) of rotary pairs.
        shared: (G, d) norms of the rows of keys or values, likewise.
        frobenius: (G,) ½(‖A‖_F² + ‖B‖_F²) of the factors.
        nuclear: (G,) nuclear norm of their product, at most as large.
    """

    own: Tensor
    shared: Tensor
    frobenius: Tensor
    nuclear: Tensor


def balance(product: Product) -> Balance:
    """Read the balance of a product; queries and keys that are normalised behind their projections have none."""
    own, shared = conserved(product)
    half = 0.5 * (_trace(product.own_gram) + _trace(product.shared_gram))
    return Balance(_norms(own), _norms(shared), half, product.group_spectrum.sum(-1))


def _norms(conserved: Tensor) -> Tensor:
    """Return the norms of rows, from Gram matrices (G, d, d) or traces of rotary pairs (G, pairs)."""
    squares = conserved.diagonal(dim1=-2, dim2=-1) if conserved.dim() == 3 else conserved
    return squares.clamp(min=0).sqrt()


def _trace(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=-2, dim2=-1).sum(-1)


class NuclearGap(WeightStatistic):
    """Gives (½(‖A‖_F² + ‖B‖_F²) − ‖AᵀB‖_*) / ½(‖A‖_F² + ‖B‖_F²) of each group: 0 where weight decay has made both
    equal, at most 1.

    Kobayashi et al. 2024, arXiv 2410.23819. Under grouped queries A joins the heads of the group. With rotary positions
    the product is that of tokens at the same position, and the gap of queries and keys need not close.
    """

    name = "nuclear_gap"
    unit = "share"
    per = "group"

    def applies(self, product: Product) -> str | None:
        return unbalanced(product)

    def of(self, product: Product) -> Tensor:
        found = balance(product)
        return (found.frobenius - found.nuclear) / found.frobenius.clamp(min=1e-30)
