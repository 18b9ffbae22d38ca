"""The largest eigenvalue of a symmetric map by Lanczos, which keeps three vectors however many steps it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Eigenvalue(NamedTuple):
    """Hold an eigenvalue, the bound of its error, and the products that it took."""

    value: float
    error: float
    products: int


def largest(product: Callable[[Tensor], Tensor], start: Tensor, iterations: int, tolerance: float) -> Eigenvalue:
    """Return the largest eigenvalue, not the largest in size, of the symmetric map `product` of vectors like `start`
    (P,).

    It ends when the residual falls to `tolerance` times the eigenvalue, or after `iterations` products. Vectors are not
    made orthogonal again: that gives copies of eigenvalues and leaves the extreme one as it is (Paige 1976). NaN where
    a product is not finite.
    """
    before, vector = torch.zeros_like(start), start / start.norm()
    diagonal: list[float] = []
    beside: list[float] = []
    value = error = float("nan")
    for step in range(1, iterations + 1):
        new = product(vector)
        finite, along = new.isfinite().all(), torch.dot(new, vector)
        new = new - along * vector - (beside[-1] if beside else 0.0) * before
        # Asked for at once: each question waits for the device.
        known, inside, size = torch.stack([finite.to(new.dtype), along, new.norm()]).tolist()
        if not known:
            return Eigenvalue(float("nan"), float("nan"), step)
        diagonal.append(inside)
        values, vectors = torch.linalg.eigh(_tridiagonal(diagonal, beside))
        value, error = float(values[-1]), size * abs(float(vectors[-1, -1]))
        # A space that the map does not leave holds all that can be found from here.
        if error <= tolerance * abs(value) or size <= 1e-12 * max(map(abs, diagonal)):
            break
        beside.append(size)
        before, vector = vector, new / size
    return Eigenvalue(value, error, len(diagonal))


def _tridiagonal(diagonal: list[float], beside: list[float]) -> Tensor:
    main, next_to = torch.tensor(diagonal, dtype=torch.float64), torch.tensor(beside, dtype=torch.float64)
    return torch.diag(main) + torch.diag(next_to, 1) + torch.diag(next_to, -1)
