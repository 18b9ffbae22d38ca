"""Two scalars, direct and as products of factors, under torch's AdamW and Adam with L2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

OPTIMUM, CURVATURE = (1.0, 0.2), ((1.0, 0.3), (0.3, 1.0))  # of the loss of two scalars: ½(w − w*)ᵀH(w − w*)
DECAYS = {1e-8: 0.3, 1.0: 0.3, 10.0: 0.03, 100.0: 0.003}  # AdamW's decay λ at each ε; Adam gets L2 of strength ε·λ
ADAM_STEPS = 3000


def two_scalars(epsilon: float, factorised: bool) -> dict[str, Any]:
    """Return the paths and ends of AdamW and of Adam with L2 of strength ε·λ on the loss of two scalars.

    `factorised` writes each scalar as a product of two parameters, so that L2 on them acts as L1 on the scalar.
    "residual" is the largest deviation, over parameters, of AdamW's end from its fixed point λw = −g/(|g| + ε).
    """
    import torch

    decay = DECAYS[epsilon]
    # Adam divides the gradient by about ε if ε is large; a rate proportional to ε keeps steps comparable.
    settings: dict[str, Any] = {"lr": 0.05 * epsilon if epsilon >= 1 else 0.002, "eps": epsilon, "foreach": False}
    results: dict[str, Any] = {"epsilon": epsilon, "factorised": factorised, "strength": epsilon * decay}
    for kind, optimizer, strength in (
        ("AdamW", torch.optim.AdamW, decay),
        ("Adam + L2", torch.optim.Adam, epsilon * decay),
    ):
        parts = [
            torch.full((2,), x, dtype=torch.float64, requires_grad=True) for x in ((0.9, 0.7) if factorised else (0.6,))
        ]
        path = _descend(parts, optimizer(parts, weight_decay=strength, **settings))
        results[kind] = {"path": path, "end": path[-1]}
        if kind == "AdamW":
            deviations = [decay * part.detach() + _pull(part.grad, epsilon) for part in parts]
            results["residual"] = max(float(part.abs().max()) for part in deviations)
    results["distance"] = sum((x - y) ** 2 for x, y in zip(results["AdamW"]["end"], results["Adam + L2"]["end"])) ** 0.5
    return results | {"solution": regularized_optimum(results["strength"], factorised)}


def _pull(gradient: Tensor | None, epsilon: float) -> Tensor:
    """Return AdamW's step at a fixed point, divided by its learning rate: g/(|g| + ε)."""
    assert gradient is not None
    return gradient / (gradient.abs() + epsilon)


def _descend(parts: list[Tensor], optimizer: torch.optim.Optimizer) -> list[list[float]]:
    import torch

    curvature, optimum = (torch.tensor(values, dtype=torch.float64) for values in (CURVATURE, OPTIMUM))
    path = []
    for step in range(ADAM_STEPS + 1):
        w = parts[0] * parts[1] if len(parts) == 2 else parts[0]
        if step % 20 == 0:
            path.append(w.tolist())
        optimizer.zero_grad()
        difference = w - optimum
        (difference @ curvature @ difference / 2).backward()
        # The last gradient is needed for the fixed point, so no step follows it.
        if step < ADAM_STEPS:
            optimizer.step()
    return path


def regularized_optimum(strength: float, factorised: bool) -> list[float]:
    """Return the minimum of the loss with λ/2·‖w‖² (direct) or λ·‖w‖₁ (factorised), by coordinate descent."""
    (h, c), (_, k) = CURVATURE
    pull = [h * OPTIMUM[0] + c * OPTIMUM[1], c * OPTIMUM[0] + k * OPTIMUM[1]]
    w = [0.0, 0.0]
    for _ in range(200):
        for at, own in ((0, h), (1, k)):
            force = pull[at] - c * w[1 - at]
            shrunk = max(abs(force) - strength, 0.0) * (1 if force > 0 else -1)
            w[at] = shrunk / own if factorised else force / (own + strength)
    return w
