"""The leading singular vectors of a matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.core.precision import at_least_fp32

# Exact for matrices whose decomposition takes milliseconds. Larger ones are bidiagonalized until the residual, relative
# to the singular value, is small: its square bounds the error of the value.
EXACT_UP_TO, STEPS, CHECKED_EVERY, RESIDUAL = 128, 300, 8, 1e-4


def unit(x: Tensor) -> Tensor:
    """Return a vector with norm 1; zero stays zero."""
    return x / x.norm().clamp(min=1e-12)


@torch.no_grad()
def leading(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the leading singular vectors (u, v) of a matrix in fp32 or wider, converged; torch's generators are not
    used."""
    matrix = at_least_fp32(matrix.detach())
    if min(matrix.shape) <= EXACT_UP_TO:
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        return left[:, 0].clone(), right[0].clone()
    return _bidiagonalized(matrix)


def _bidiagonalized(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the leading singular vectors by Golub-Kahan-Lanczos bidiagonalisation with full reorthogonalisation.

    W V = U B with B upper bidiagonal. For B's leading triple (p, s, q), the residual of (Up, s, Vq) is the last
    off-diagonal entry times p's last entry, and the error of s is of the order of its square.
    """
    rows, columns = matrix.shape
    left, right = matrix.new_zeros(STEPS, rows), matrix.new_zeros(STEPS + 1, columns)
    diagonal, above = torch.zeros(2, STEPS, dtype=torch.float64)
    right[0] = unit(torch.randn(columns, generator=torch.Generator().manual_seed(0)).to(matrix))
    for step in range(STEPS):
        diagonal[step] = _orthogonal(matrix @ right[step], left, step)
        above[step] = _orthogonal(matrix.t() @ left[step], right, step + 1)
        size = step + 1
        # An entry of zero ends the search: the vectors so far span everything the start can reach.
        ended = size == min(rows, columns) or not diagonal[step] or not above[step]
        if size % CHECKED_EVERY and not ended and size < STEPS:
            continue
        inner = torch.diag(diagonal[:size]) + torch.diag(above[: size - 1], 1)
        p, values, q = torch.linalg.svd(inner)
        if ended or above[step] * p[-1, 0].abs() <= RESIDUAL * values[0]:
            break
    return unit(left[:size].t() @ p[:, 0].to(matrix)), unit(right[:size].t() @ q[0].to(matrix))


def _orthogonal(vector: Tensor, basis: Tensor, count: int) -> float:
    """Write the part of a vector that is orthogonal to the first `count` rows of a basis into the next row, with norm
    1, and return its norm; 0 if rounding is all that is left."""
    size = norm = float(torch.linalg.vector_norm(vector))
    # A second pass where the first took most of the vector away, and with it digits; twice is enough.
    for _ in range(2):
        before, vector = norm, vector - basis[:count].t() @ (basis[:count] @ vector)
        norm = float(torch.linalg.vector_norm(vector))
        if norm > before / 2:
            break
    if norm <= 10 * torch.finfo(vector.dtype).eps * size:
        return 0.0
    basis[count] = vector / norm
    return norm
