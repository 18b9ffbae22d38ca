"""Repeated passes of values through one layer's attention, and the errors of the theory's statements on them."""

from __future__ import annotations

from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

TOKENS, SIZE, STRENGTHS = 32, 16, (0.0, 0.2, 0.4, 0.6, 1.0, 2.0)
# passes that are recorded one by one, and the number of passes that approximates the limit
DEPTH, LIMIT = 200, 1 << 14
# tokens and steps of random walks, few enough to enumerate every walk
WALKERS, STEPS = 5, 4
KINDS = ("symmetric", "attention")


def layer(seed: int, kind: str, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """Return the kernel exp(xᵀk/√d) (T, T), x the keys or the queries, and the values (T, d) of a random layer."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, SIZE, generator=generator, dtype=torch.float64) for _ in range(3))
    return ((k if kind == "symmetric" else q) @ k.T / SIZE**0.5).exp(), v


def measure(seed: int, kind: str) -> dict[str, Any]:
    """Return the trajectories of one random layer's values, and the errors of all statements on them."""
    import torch

    kernel, values = layer(seed, kind)
    attention = kernel / kernel.sum(1, keepdim=True)
    stationary = stationary_of(attention)
    paths = {strength: spreads(attention, values, strength) for strength in STRENGTHS}
    plain = torch.linalg.matrix_power(attention, LIMIT) @ values
    return {
        "seed": seed,
        "kind": kind,
        "walk_error": walk_error(seed, kind),
        "degree_error": float((kernel.sum(1) / kernel.sum() - stationary).abs().max()),
        "stationary_error": float((attention.T @ stationary - stationary).abs().max()),
        "to_the_mean": float((plain - stationary @ values).abs().max()),
        "second": float(torch.linalg.eigvals(attention).abs().sort().values[-2]),
        "least": float(torch.linalg.eigvals(attention).real.min()),
        "spreads": paths,
        "ends": {strength: fixed_point_error(attention, values, strength) for strength in STRENGTHS if strength},
        "step_error": step_error(kernel, values),
        "functional": functional_path(kernel, values),
    }


def stationary_of(attention: Tensor) -> Tensor:
    """Return the left eigenvector (T,) of the eigenvalue 1, as a distribution."""
    import torch

    values, vectors = torch.linalg.eig(attention.T)
    vector = vectors[:, values.real.argmax()].real
    return vector / vector.sum()


def walk_error(seed: int, kind: str) -> float:
    """Return the deviation of u after four passes from the expected value of all enumerated four-step walks (Lemma
    1)."""
    import torch

    kernel, values = layer(seed, kind, tokens=WALKERS)
    attention = kernel / kernel.sum(1, keepdim=True)
    passed = torch.linalg.matrix_power(attention, STEPS) @ values
    expected = torch.zeros_like(values)
    for walk in product(range(WALKERS), repeat=STEPS + 1):
        chance = torch.stack([attention[a, b] for a, b in pairwise(walk)]).prod()
        expected[walk[0]] += chance * values[walk[-1]]
    return float((passed - expected).abs().max())


def spreads(attention: Tensor, values: Tensor, strength: float) -> list[float]:
    """Return ‖u − mean of tokens‖ divided by its initial value, before the first pass and after each."""
    initial, u = float((values - values.mean(0)).norm()), values
    ratios = [1.0]
    for _ in range(DEPTH):
        u = attention @ u + strength * (values - u)
        ratios.append(float((u - u.mean(0)).norm()) / initial)
    return ratios


def fixed_point_error(attention: Tensor, values: Tensor, strength: float) -> float | None:
    """Return the relative deviation of u after all passes from λ((1 + λ)I − A)⁻¹u⁰; None if the passes do not converge.

    They converge if all eigenvalues of A − λI are below 1 in absolute value.
    """
    import torch

    identity = torch.eye(len(attention), dtype=attention.dtype)
    if float(torch.linalg.eigvals(attention - strength * identity).abs().max()) >= 1:
        return None
    end = strength * torch.linalg.solve((1 + strength) * identity - attention, values)
    u = values
    for _ in range(DEPTH):
        u = attention @ u + strength * (values - u)
    return float((u - end).norm() / end.norm())


def functional(u: Tensor, kernel: Tensor) -> Tensor:
    """Return J(u) = ¼ Σ_ij K_ij ‖u_i − u_j‖²."""
    return (kernel * (u[:, None] - u[None]).square().sum(-1)).sum() / 4


def step_error(kernel: Tensor, values: Tensor) -> float:
    """Return the deviation of attention from u − ∇J/ΣK, with J's gradient by autograd.

    J depends only on the symmetric part of a kernel.
    """
    u = values.clone().requires_grad_()
    functional(u, kernel).backward()  # type: ignore[no-untyped-call]  # torch's own
    assert u.grad is not None
    return float(
        (values - u.grad / kernel.sum(1, keepdim=True) - kernel / kernel.sum(1, keepdim=True) @ values).abs().max()
    )


def functional_path(kernel: Tensor, values: Tensor) -> list[float]:
    """Return J with the layer's own kernel, before the first pass and after each, relative to its initial value."""
    attention, u, values_of_j = kernel / kernel.sum(1, keepdim=True), values, []
    for _ in range(DEPTH + 1):
        values_of_j.append(float(functional(u, (kernel + kernel.T) / 2)))
        u = attention @ u
    return [value / values_of_j[0] for value in values_of_j]
