"""Largest singular values on a GPU, by squaring small matrices: no solver, which would wait for the device.

G^(2^k) has the eigenvectors of G, and its columns point along the first ones. The Rayleigh quotient of such a column
has the square of the column's error. With k squarings it is below the largest eigenvalue by at most ln(n) / 2^(k+1) of
it, which is reached only where many eigenvalues are that close; with one that stands out, it is exact to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.numerics.precision import at_least_fp32

# Relative error at most 0.3 % for 1,024 columns.
SQUARINGS = 10
# After so many squarings numbers are brought to size 1: (1/√n)^8 is within the range of bf16 and fp32.
UNTIL_SCALED = 3


def largest_square(x: Tensor) -> Tensor:
    """Return σ₁² (B,) in fp32 of matrices x (B, T, C) with entries of size 1; NaN for one that is not finite.

    The products of the squarings are in bf16, on tensor cores, because they only choose the direction.
    """
    if x.shape[1] < x.shape[2]:
        x = x.mT
    rough = x.bfloat16()
    along = _leading_column(rough.mT @ rough)
    return (at_least_fp32(x) @ along).square().sum((1, 2))


def largest_product(own: Tensor, shared: Tensor) -> Tensor:
    """Return σ₁ (H,) of AᵀB for A Aᵀ = `own` and B Bᵀ = `shared` (H, d, d); NaN for one that is not finite."""
    # Its right singular vector is Bᵀu, with u the first eigenvector of A Aᵀ B Bᵀ.
    u = _leading_column(own @ shared)
    reached = shared @ u
    length = (u * reached).sum((1, 2))
    square = (reached * (own @ reached)).sum((1, 2)) / torch.where(length == 0, 1.0, length)
    return square.clamp_min(0).sqrt()


def _leading_column(matrix: Tensor) -> Tensor:
    """Return a unit vector (n, d, 1) along the first eigenvector of each matrix with eigenvalues of at least 0."""
    for step in range(SQUARINGS):
        if step % UNTIL_SCALED == 0:
            size = torch.linalg.vector_norm(matrix, dim=(1, 2), keepdim=True)
            matrix = matrix / torch.where(size == 0, 1.0, size)
        matrix = matrix @ matrix
    # The longest column: no start vector, which might be orthogonal to it.
    lengths = torch.linalg.vector_norm(matrix, dim=1)
    place = lengths.argmax(-1)[:, None, None].expand(-1, matrix.shape[1], 1)
    column = at_least_fp32(matrix.gather(2, place))
    size = torch.linalg.vector_norm(column, dim=(1, 2), keepdim=True)
    return column / torch.where(size == 0, 1.0, size)
