"""Sharpness: the largest eigenvalue of a loss's Hessian, and its ratio to the optimizer's threshold of stability."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from headwise.statistics.curvature.hessian import Hessian, flat
from headwise.statistics.curvature.lanczos import largest
from headwise.statistics.curvature.stability import Stability, stability


@dataclass(frozen=True)
class Sharpness:
    """The sharpness of a loss.

    Attributes:
        value: the largest eigenvalue of the Hessian H, in nats per squared parameter.
        error: a bound of its error.
        products: number of Hessian-vector products.
        preconditioned: the largest eigenvalue of P⁻¹H with the optimizer's preconditioner P, or None.
        threshold: the value of `preconditioned` above which the optimizer's steps on a quadratic grow, or None.
        missing: the reason why the last two are None although an optimizer was given.
    """

    value: float
    error: float
    products: int
    preconditioned: float | None = None
    threshold: float | None = None
    missing: str = ""

    @property
    def share(self) -> float | None:
        """Return preconditioned / threshold, or None; above 1 the loss is too sharp for the optimizer."""
        if self.preconditioned is None or self.threshold is None:
            return None
        return self.preconditioned / self.threshold


def sharpness(
    loss: Callable[[], Tensor],
    parameters: nn.Module | Iterable[Tensor],
    optimizer: Optimizer | None = None,
    *,
    iterations: int = 50,
    tolerance: float = 1e-3,
) -> Sharpness:
    """Return the largest eigenvalue of a loss's Hessian by Lanczos on Hessian-vector products.

    The loss is computed once; each product costs about two more backward passes and as much memory as its graph. CUDA,
    XPU and MPS devices synchronise once in fifty products, and so may compute up to that many more than a CPU.
    Attention uses torch's math kernel, because fused kernels have no second derivative. Detached parts of the loss
    count as constants. Gradients and parameters do not change.

    Args:
        loss: a function that returns the loss (0-d) of a batch, for example `lambda: criterion(model(x), y)`.
        parameters: a model, whose parameters that require gradients are used, or tensors that require gradients.
        optimizer: SGD, Adam, AdamW or Adagrad of torch, for the preconditioned sharpness and the threshold of
            stability.
        iterations: maximum number of products.
        tolerance: relative error at which the iteration ends.

    Raises:
        TypeError: if `loss` is not a function.
        ValueError: if there is no parameter, the loss is not a 0-d tensor with a graph or cannot be differentiated
            twice, or a number is out of range.

    Example:
        >>> import torch, headwise
        >>> model, x = torch.nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> found = headwise.sharpness(lambda: model(x).square().sum(), model, optimizer)
        >>> round(found.value, 2), round(found.share, 2)  # the Hessian is diag(2, 8); SGD bears 2 / 0.1
        (8.0, 0.4)
    """
    if iterations < 1 or not tolerance > 0:
        raise ValueError(f"iterations is at least 1 and tolerance above 0, got {iterations} and {tolerance}")
    if not callable(loss):
        raise TypeError(
            "sharpness() computes the loss itself: pass a function, such as lambda: criterion(model(x), y), not a "
            f"{type(loss).__name__}"
        )
    candidates = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    learned = [p for p in candidates if p.requires_grad]
    if not learned:
        raise ValueError("sharpness() needs parameters that require a gradient, and got none")
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        hessian = Hessian(loss(), learned)
        start = _start(learned)
        products: list[Callable[[Tensor], Tensor]] = [hessian.product]
        limit, missing = None, ""
        if optimizer is not None:
            try:
                limit = stability(optimizer, learned)
            except ValueError as error:
                missing = str(error)
        if limit is not None and limit.scales is not None:
            products.append(_scaled(hessian, limit, start))
        eigenvalues = largest(products, start, iterations, tolerance)
    if limit is None:
        return Sharpness(*eigenvalues[0], missing=missing)
    return Sharpness(*eigenvalues[0], eigenvalues[-1].value, limit.threshold)


def _start(parameters: list[Tensor]) -> Tensor:
    """Return a random start vector, drawn without torch's global generators."""
    size, first = sum(p.numel() for p in parameters), parameters[0]
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(0))
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    return drawn.to(first.device, wide, non_blocking=True)


def _scaled(hessian: Hessian, limit: Stability, like: Tensor) -> Callable[[Tensor], Tensor]:
    """Return v ↦ P^(−1/2)·H·P^(−1/2)·v, which is symmetric and has the eigenvalues of P⁻¹H."""
    assert limit.scales is not None
    root = flat(limit.scales, hessian.parameters, like).sqrt()
    return lambda vector: root * hessian.product(root * vector)
