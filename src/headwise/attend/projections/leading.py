"""The leading singular vectors of a matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.numerics.precision import at_least_fp32

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
    """Return the leading singular vectors by Golub-Kahan-Lanczos bidiagonalisation.

    W V = U B with B upper bidiagonal. For B's leading triple (p, s, q), the residual of (Up, s, Vq) is the last
    off-diagonal entry times p's last entry, and the error of s is of the order of its square. Only V is orthogonalised
    in full, which keeps U orthogonal enough for the leading triple (Simon and Zha 2000, doi 10.1137/S1064827597327309);
    Up is WVq / s.
    """
    if matrix.shape[0] < matrix.shape[1]:
        right, left = _bidiagonalized(matrix.t())
        return left, right
    columns, turned = matrix.shape[1], matrix.t()
    vectors, left = matrix.new_zeros(STEPS + 1, columns), matrix.new_zeros(len(matrix))
    diagonal, above = torch.zeros(2, STEPS, dtype=torch.float64)
    vectors[0] = unit(torch.randn(columns, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(matrix))
    beside = 0.0
    for step in range(STEPS):
        image = matrix @ vectors[step]
        left = torch.sub(image, left, alpha=beside)
        entry = float(torch.linalg.vector_norm(left))
        if entry <= _rounding(matrix) * max(entry, beside):
            entry = 0.0
        else:
            left /= entry
        # Without what the recurrence takes away first, one pass leaves an error that grows with each step.
        beside = _orthogonal(torch.addmv(-entry * vectors[step], turned, left), vectors, step + 1)
        diagonal[step], above[step], size = entry, beside, step + 1
        # An entry of zero ends the search: the vectors so far span everything the start can reach.
        ended = size == columns or not entry or not beside
        if size % CHECKED_EVERY and not ended and size < STEPS:
            continue
        inner = torch.diag(diagonal[:size]) + torch.diag(above[: size - 1], 1)
        p, values, q = torch.linalg.svd(inner)
        if ended or beside * p[-1, 0].abs() <= RESIDUAL * values[0]:
            break
    right = unit(vectors[:size].t() @ q[0].to(matrix))
    return unit(matrix @ right), right


def _rounding(x: Tensor) -> float:
    return 10 * torch.finfo(x.dtype).eps


def _orthogonal(vector: Tensor, basis: Tensor, count: int) -> float:
    """Write the part of a vector that is orthogonal to the first `count` rows of a basis into the next row, with norm
    1, and return its norm; 0 if rounding is all that is left."""
    known = basis[:count]
    size = norm = float(torch.linalg.vector_norm(vector))
    # A second pass where the first took most of the vector away, and with it digits; twice is enough.
    for _ in range(2):
        before, vector = norm, torch.addmv(vector, known.t(), known @ vector, alpha=-1)
        norm = float(torch.linalg.vector_norm(vector))
        if norm > before / 2:
            break
    if norm <= _rounding(vector) * size:
        return 0.0
    torch.div(vector, norm, out=basis[count])
    return norm
