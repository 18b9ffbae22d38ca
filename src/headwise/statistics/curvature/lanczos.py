"""The largest eigenvalue of a symmetric map by Lanczos, which keeps three vectors however many steps it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# A CPU is asked after each product whether it was the last; devices for which asking is waiting after so many.
WAITING, PAUSE = ("cuda", "xpu", "mps"), 50


class Eigenvalue(NamedTuple):
    """Hold an eigenvalue, the bound of its error, and the products that it took."""

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
    before, vector, size = torch.zeros_like(start), start / start.norm(), start.new_zeros(())
    pause = (pause or PAUSE) if start.device.type in WAITING else 1
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
    """Return what the first products give that suffice, of which there are at least `first`, and whether any do."""
    diagonal, beside = [row[1] for row in rows], [row[2] for row in rows]
    found = Eigenvalue(float("nan"), float("nan"), len(rows))
    for step, (known, _, size) in enumerate(rows, 1):
        if not known:
            return Eigenvalue(float("nan"), float("nan"), step), True
        if step < first:
            continue
        values, vectors = torch.linalg.eigh(_tridiagonal(diagonal[:step], beside[: step - 1]))
        found = Eigenvalue(float(values[-1]), size * abs(float(vectors[-1, -1])), step)
        # A space that the map does not leave holds all that can be found from here.
        if found.error <= tolerance * abs(found.value) or size <= 1e-12 * max(map(abs, diagonal[:step])):
            return found, True
    return found, False


def _tridiagonal(diagonal: list[float], beside: list[float]) -> Tensor:
    main, next_to = torch.tensor(diagonal, dtype=torch.float64), torch.tensor(beside, dtype=torch.float64)
    return torch.diag(main) + torch.diag(next_to, 1) + torch.diag(next_to, -1)
