"""How the factors of a product balance: the norms of their rows, and the Frobenius against the nuclear norm."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headwise.statistics.weights.imbalance import conserved
from headwise.statistics.weights.product import Product


@dataclass(frozen=True, eq=False)
class Balance:
    """What weight decay makes equal, of each group of heads that share keys and values.

    Kobayashi et al. 2024, arXiv 2410.23819, compare them in pretrained models: rows of W_Q with those of W_K, columns of P
    with rows of W_V, and both norms of every head.

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
    """Give the norms of rows, from Gram matrices (G, d, d) or traces of rotary pairs (G, pairs)."""
    squares = conserved.diagonal(dim1=-2, dim2=-1) if conserved.dim() == 3 else conserved
    return squares.clamp(min=0).sqrt()


def _trace(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=-2, dim2=-1).sum(-1)
