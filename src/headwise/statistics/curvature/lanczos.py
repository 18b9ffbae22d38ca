"""The largest eigenvalue of a symmetric map by the Lanczos method, which stores three vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Convergence is checked after each product on a CPU, and after every PAUSE products on devices that must synchronise.
WAITING, PAUSE = ("cuda", "xpu", "mps"), 50


class Eigenvalue(NamedTuple):
    """An eigenvalue, a bound of its error, and the number of products that it took."""

    value: float
    error: float
    products: int


def largest(
    products: Sequence[Callable[[Tensor], Tensor]], start: Tensor, iterations: int, tolerance: float
) -> list[Eigenvalue]:
    """Return the largest eigenvalue (not in absolute value) of each symmetric map of vectors like `start` (P,).

    An iteration ends when the residual is at most `tolerance` times the eigenvalue, or after `iterations` products. On
    devices it may run up to `PAUSE` products longer, and all maps are read with one synchronisation. Vectors are not
    reorthogonalised, which produces copies of eigenvalues and does not affect the largest one (Paige 1976). The
    eigenvalue is NaN if a product is not finite.
    """
    every = [_coefficients(product, start, iterations, tolerance) for product in products]
    numbers = iter(torch.cat(every).tolist())
    return [_read([next(numbers) for _ in rows], tolerance)[0] for rows in every]


def _coefficients(product: Callable[[Tensor], Tensor], start: Tensor, iterations: int, tolerance: float) -> Tensor:
    """Return a row per product: whether it is finite, its component along its vector, and the norm of the rest."""
    before, vector, size = torch.zeros_like(start), start / start.norm(), start.new_zeros(())
    pause = PAUSE if start.device.type in WAITING else 1
    rows: list[Tensor] = []
    for step in range(1, iterations + 1):
        new = product(vector)
        finite, along = new.isfinite().all(), torch.dot(new, vector)
        new = new - along * vector - size * before
        size = new.norm()
        rows.append(torch.stack([finite.to(new.dtype), along, size]))
        if step % pause == 0 and step < iterations and _read(torch.stack(rows).tolist(), tolerance, step)[1]:
            break
        before, vector = vector, new / size
    return torch.stack(rows)


def _read(rows: list[list[float]], tolerance: float, first: int = 1) -> tuple[Eigenvalue, bool]:
    """Return the eigenvalue from the fewest products, at least `first`, that converge, and whether they converged."""
    diagonal, off_diagonal = [row[1] for row in rows], [row[2] for row in rows]
    eigenvalue = Eigenvalue(float("nan"), float("nan"), len(rows))
    for step, (finite, _, size) in enumerate(rows, 1):
        if not finite:
            return Eigenvalue(float("nan"), float("nan"), step), True
        if step < first:
            continue
        values, vectors = torch.linalg.eigh(_tridiagonal(diagonal[:step], off_diagonal[: step - 1]))
        eigenvalue = Eigenvalue(float(values[-1]), size * abs(float(vectors[-1, -1])), step)
        # A norm of 0 means that the vectors span an invariant subspace, beyond which the iteration finds nothing.
        if eigenvalue.error <= tolerance * abs(eigenvalue.value) or size <= 1e-12 * max(map(abs, diagonal[:step])):
            return eigenvalue, True
    return eigenvalue, False


def _tridiagonal(diagonal: list[float], off_diagonal: list[float]) -> Tensor:
    main, side = torch.tensor(diagonal, dtype=torch.float64), torch.tensor(off_diagonal, dtype=torch.float64)
    return torch.diag(main) + torch.diag(side, 1) + torch.diag(side, -1)
