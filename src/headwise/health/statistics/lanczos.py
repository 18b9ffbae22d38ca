"""The largest eigenvalue of a symmetric map by the Lanczos method, which stores three vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.numerics.precision import directions, norms

# Convergence is checked after each product on a CPU, and after every PAUSE products on devices that must synchronise.
WAITING, PAUSE = ("cuda", "xpu", "mps"), 50


class Eigenvalue(NamedTuple):
    """An eigenvalue, a bound of its error, and the number of products that it took."""

    value: float
    error: float
    products: int


def read(rows: Tensor, tolerance: float) -> Eigenvalue:
    """Return the largest eigenvalue that the coefficients (products, 3) of a map give; NaN where a product is not
    finite."""
    return _read(rows.tolist(), tolerance)[0]


def coefficients(
    product: Callable[[Tensor], Tensor], start: Tensor, iterations: int, tolerance: float, pause: int | None = None
) -> Tensor:
    """Return a row for each product of a symmetric map of vectors like `start` (P,): whether it was finite, its part
    along its vector, and the size of what is left.

    They end when the residual falls to `tolerance` times the largest eigenvalue, not the largest in size, or after
    `iterations` products. A device is waited for after every `pause` of them, `PAUSE` where none is given, and not
    after the last. Vectors are not made orthogonal again: that gives copies of eigenvalues and leaves the extreme one
    as it is (Paige 1976).
    """
    before, vector, size = torch.zeros_like(start), directions(start), start.new_zeros(())
    pause = (pause or PAUSE) if start.device.type in WAITING else 1
    rows: list[Tensor] = []
    for step in range(1, iterations + 1):
        new = product(vector)
        finite, along = new.isfinite().all(), torch.dot(new, vector)
        new = new - along * vector - size * before
        size = norms(new)
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
