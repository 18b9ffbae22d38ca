"""The distance of a product's factors from the balance to which weight decay leads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.health.statistics.weights.product import Product, WeightStatistic, unbalanced


class Imbalance(WeightStatistic):
    """Computes ‖Σ_h P_hᵀP_h − W_VW_Vᵀ‖_F, and the same for queries and keys, divided by the sum of the two norms.

    Kobayashi et al. 2024, arXiv 2410.23819: under weight decay λ the difference vanishes as e^{−2λt}, so a small share
    (between 0 and 1) means that decay has acted long enough for the law. The sum is over the heads of a group. With
    rotary positions queries and keys only balance in the traces of rotary pairs, so these are compared.
    """

    name = "imbalance"
    unit = "share"
    per = "group"

    def applies(self, product: Product) -> str | None:
        return unbalanced(product)

    def of(self, product: Product) -> Tensor:
        own, shared = conserved(product.in_one_unit)
        size = _norm(own) + _norm(shared)
        return _norm(own - shared) / torch.where(size == 0, 1, size)


def conserved(product: Product) -> tuple[Tensor, Tensor]:
    """Return the two terms whose difference is constant under gradient flow without decay.

    They are Gram matrices (G, d, d), or with rotary positions the traces (G, pairs) of rotary pairs.
    """
    if product.pairs is None:
        return product.own_gram, product.shared_gram
    pairs = product.pairs.to(product.own.device, non_blocking=True)
    once = (pairs[:, 0] != pairs[:, 1]).to(product.own)
    traces = []
    for gram in (product.own_gram, product.shared_gram):
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        traces.append(diagonal[:, pairs[:, 0]] + once * diagonal[:, pairs[:, 1]])
    return traces[0], traces[1]


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.flatten(1), dim=-1)


@dataclass(frozen=True, eq=False)
class Balance:
    """The pairs of norms that weight decay makes equal, for each group of heads that share keys and values.

    Kobayashi et al. 2024, arXiv 2410.23819, compare them in pretrained models: rows of W_Q with rows of W_K, columns of
    P with rows of W_V, and both norms of every head.

    Attributes:
        own: (G, d) norms of the rows of queries or output over all heads of a group, or (G, pairs) of rotary pairs.
        shared: (G, d) norms of the rows of keys or values, or (G, pairs) of rotary pairs.
        frobenius: (G,) ½(‖A‖_F² + ‖B‖_F²) of the factors.
        nuclear: (G,) nuclear norm of their product, which is at most `frobenius`.
    """

    own: Tensor
    shared: Tensor
    frobenius: Tensor
    nuclear: Tensor


def balance(product: Product) -> Balance:
    """Return the balance of a product for which `unbalanced` returns None."""
    unit = product.one_unit
    own, shared = (_norms(terms) * unit[:, None] for terms in conserved(product.in_one_unit))
    half, nuclear = (norm * unit * unit for norm in _compared(product))
    return Balance(own, shared, half, nuclear)


def _compared(product: Product) -> tuple[Tensor, Tensor]:
    """Return ½(‖A‖_F² + ‖B‖_F²) and ‖AᵀB‖_* of each group (G,), in the square of the factors' one unit."""
    half = 0.5 * (_trace(product.in_one_unit.own_gram) + _trace(product.in_one_unit.shared_gram))
    own, shared = (unit / product.one_unit for unit in product.units)
    return half, product.relative_group_spectrum.sum(-1) * own * shared


def _norms(conserved: Tensor) -> Tensor:
    """Return the norms of rows, from Gram matrices (G, d, d) or traces of rotary pairs (G, pairs)."""
    squares = conserved.diagonal(dim1=-2, dim2=-1) if conserved.dim() == 3 else conserved
    return squares.clamp(min=0).sqrt()


def _trace(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=-2, dim2=-1).sum(-1)


class NuclearGap(WeightStatistic):
    """Computes (½(‖A‖_F² + ‖B‖_F²) − ‖AᵀB‖_*) / ½(‖A‖_F² + ‖B‖_F²) of each group.

    Kobayashi et al. 2024, arXiv 2410.23819. It is between 0, where weight decay has made both equal, and 1. Under
    grouped queries A concatenates the heads of the group. With rotary positions the product is that of tokens at the
    same position, and the gap of queries and keys need not close.
    """

    name = "nuclear_gap"
    unit = "share"
    per = "group"

    def applies(self, product: Product) -> str | None:
        return unbalanced(product)

    def of(self, product: Product) -> Tensor:
        half, nuclear = _compared(product)
        return (half - nuclear) / torch.where(half == 0, 1, half)
