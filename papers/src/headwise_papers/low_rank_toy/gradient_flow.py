"""The gradient flow of a factorised least-squares problem under L2, and the nuclear-norm problem on its product."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Matrix = NDArray[np.float64]
    Velocity = Callable[[Matrix, Matrix], tuple[Matrix, Matrix]]

SINGULAR_VALUES = (3.0, 2.0, 1.4, 0.8, 0.4, 0.1)
STRENGTHS = (0.0, 0.25, 0.5, 1.0)
SHAPE = (12, 10)  # of M; the factors have one column per singular value of M
TIME, STEP, EVERY = 80.0, 0.02, 25  # duration and step of the gradient flow; steps between records
LAW_UNTIL = 1e-9  # share of the initial ‖AᵀA − BᵀB‖ below which only rounding remains


def problem(seed: int) -> tuple[Matrix, Matrix, Matrix]:
    """Return M with the given singular values and unbalanced random factors A (12, 6) and B (10, 6)."""
    import numpy as np

    rng = np.random.default_rng(seed)
    rank = len(SINGULAR_VALUES)
    left, right = (np.linalg.qr(rng.standard_normal((rows, rank)))[0] for rows in SHAPE)
    target = left * np.array(SINGULAR_VALUES) @ right.T
    # A starts larger than B, because a balanced start has nothing to decay.
    return target, 0.5 * rng.standard_normal((SHAPE[0], rank)), 0.2 * rng.standard_normal((SHAPE[1], rank))


def flow(seed: int, strength: float, loss_factor: float = 1.0) -> dict[str, Any]:
    """Return the trajectory and end of the gradient flow of loss_factor·½‖ABᵀ − M‖² + λ/2(‖A‖² + ‖B‖²).

    The result also has the solution of the nuclear-norm problem on the product, and the largest ratio of the gap of the
    norms to its bound.
    """
    import numpy as np

    target, a, b = problem(seed)

    def velocity(a: Matrix, b: Matrix) -> tuple[Matrix, Matrix]:
        residual = loss_factor * (a @ b.T - target)
        return -(residual @ b + strength * a), -(residual.T @ a + strength * b)

    start, course = float(np.linalg.norm(a.T @ a - b.T @ b)), []
    for step in range(round(TIME / STEP) + 1):
        if step % EVERY == 0:
            course.append(_record(step * STEP, a, b, start, strength))
        a, b = _runge_kutta(velocity, a, b)
    followed = [point for point in course if point["law"] > LAW_UNTIL * start]
    return {
        "seed": seed,
        "strength": strength,
        "course": course,
        "end": np.linalg.svd(a @ b.T, compute_uv=False)[: len(SINGULAR_VALUES)].tolist(),
        "nuclear": _nuclear(target, strength / loss_factor),
        "thresholded": [max(value - strength / loss_factor, 0.0) for value in SINGULAR_VALUES],
        "law_error": max(abs(point["balance"] / point["law"] - 1) for point in followed),
        "bound_used": max(point["gap"] / point["bound"] for point in course if point["bound"] > 1e-6),
    }


def _runge_kutta(velocity: Velocity, a: Matrix, b: Matrix) -> tuple[Matrix, Matrix]:
    first = velocity(a, b)
    second = velocity(a + STEP / 2 * first[0], b + STEP / 2 * first[1])
    third = velocity(a + STEP / 2 * second[0], b + STEP / 2 * second[1])
    last = velocity(a + STEP * third[0], b + STEP * third[1])
    moved_a, moved_b = (
        x + STEP / 6 * (k1 + 2 * k2 + 2 * k3 + k4) for x, k1, k2, k3, k4 in zip((a, b), first, second, third, last)
    )
    return moved_a, moved_b


def _record(time: float, a: Matrix, b: Matrix, start: float, strength: float) -> dict[str, Any]:
    import numpy as np

    spread = a.T @ a - b.T @ b
    nuclear = np.linalg.norm(a @ b.T, "nuc")
    squares = (np.sum(a * a) + np.sum(b * b)) / 2
    bound = np.sqrt(np.linalg.norm(spread, "nuc")) * (np.linalg.norm(a, "nuc") + np.linalg.norm(b, "nuc")) / 2
    return {
        "time": time,
        "balance": float(np.linalg.norm(spread)),
        "law": float(start * np.exp(-2 * strength * time)),
        "gap": float(squares - nuclear),
        "bound": float(bound),
        "singular": np.linalg.svd(a @ b.T, compute_uv=False)[: len(SINGULAR_VALUES)].tolist(),
    }


def _nuclear(target: Matrix, strength: float) -> list[float]:
    """Return the singular values of the minimum of ½‖W − M‖² + λ‖W‖_*, by proximal gradient steps."""
    import numpy as np

    w = np.zeros_like(target)
    for _ in range(100):
        u, values, v = np.linalg.svd(w - 0.5 * (w - target), full_matrices=False)
        w = u * np.maximum(values - 0.5 * strength, 0) @ v
    return np.linalg.svd(w, compute_uv=False)[: len(SINGULAR_VALUES)].tolist()
