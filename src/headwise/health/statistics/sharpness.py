"""Sharpness: the largest eigenvalue of a loss's Hessian, and the sharpness above which an optimizer is unstable."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD, Adagrad, Adam, Optimizer

from headwise.files.arguments import is_a
from headwise.health.statistics.lanczos import coefficients, read

TWICE = (
    "the loss cannot be differentiated twice ({why}): fused kernels and compiled graphs have no second derivative; "
    "compute it with plain operations, for example by the model before torch.compile, without its activation "
    "checkpointing"
)


class Hessian:
    """The Hessian of a loss as a linear map of vectors, with one backward pass per product (Pearlmutter 1994).

    Args:
        loss: a 0-d tensor whose graph has not been freed.
        parameters: the parameters, in their order in a vector (P,).

    Raises:
        ValueError: if the loss is not a 0-d tensor with a graph, or an operation has no second derivative.
    """

    def __init__(self, loss: Tensor, parameters: Sequence[Tensor]) -> None:
        if not isinstance(loss, Tensor):
            raise ValueError(f"sharpness needs a loss that is a 0-d tensor with a graph, got a {type(loss).__name__}")
        if loss.dim() or not loss.requires_grad:
            raise ValueError(
                f"sharpness needs a loss that is a 0-d tensor with a graph, got the shape {tuple(loss.shape)}"
                + ("" if loss.requires_grad else " without a graph: compute it with gradients on")
            )
        self.parameters = list(parameters)
        self.size = sum(p.numel() for p in self.parameters)
        gradients = self._differentiate(loss, again=True)
        # Parameters that the loss is linear in or does not depend on have no second derivative.
        self._curved = [(i, g) for i, g in enumerate(gradients) if g is not None and g.requires_grad]

    def product(self, vector: Tensor) -> Tensor:
        """Return H·v for a vector (P,) in the parameters' order."""
        parts = self.split(vector)
        if not self._curved:
            return torch.zeros_like(vector)
        along = torch.stack([(gradient * parts[i].to(gradient)).sum() for i, gradient in self._curved]).sum()
        return flat(self._differentiate(along), self.parameters, vector)

    def split(self, vector: Tensor) -> list[Tensor]:
        """Return views of a vector (P,), one in the shape of each parameter."""
        parts = vector.split([p.numel() for p in self.parameters])
        return [part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)]

    def _differentiate(self, value: Tensor, again: bool = False) -> tuple[Tensor | None, ...]:
        try:
            return torch.autograd.grad(value, self.parameters, create_graph=again, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            raise ValueError(TWICE.format(why=str(error).splitlines()[0])) from error


def flat(parts: Iterable[Tensor | None], parameters: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the vector (P,) of one tensor per parameter, where None means zeros."""
    pairs = zip(parts, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if part is None else part).flatten().to(like) for part, p in pairs])


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


@dataclass(frozen=True)
class Underway:
    """Lanczos coefficients of one map, or of two, that are still on the device."""

    rows: list[Tensor]
    tolerance: float
    limit: Stability | None
    missing: str

    def read(self, rows: Sequence[Tensor]) -> Sharpness:
        """Return the sharpness from its `rows` brought to the CPU."""
        found = [read(one, self.tolerance) for one in rows]
        if self.limit is None:
            return Sharpness(*found[0], missing=self.missing)
        return Sharpness(*found[0], found[-1].value, self.limit.threshold)


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
    found = sharpness_underway(loss, parameters, optimizer, iterations=iterations, tolerance=tolerance)
    return found.read(torch.cat(found.rows).cpu().split([len(rows) for rows in found.rows]))


def sharpness_underway(
    loss: Callable[[], Tensor],
    parameters: nn.Module | Iterable[Tensor],
    optimizer: Optimizer | None = None,
    *,
    iterations: int = 50,
    tolerance: float = 1e-3,
) -> Underway:
    """Return what `sharpness` is read from, without waiting for a device in the first fifty products."""
    is_a("parameters", parameters, (nn.Module, Iterable), "a torch module or its parameters")
    is_a("iterations", iterations, int, "a whole number")
    is_a("tolerance", tolerance, (int, float), "a number")
    is_a("optimizer", optimizer, (Optimizer, type(None)), "an optimizer or None")
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
        return Underway(
            [coefficients(one, start, iterations, tolerance) for one in products], tolerance, limit, missing
        )


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


@dataclass(frozen=True)
class Stability:
    """The threshold of stability of an optimizer.

    Attributes:
        threshold: the eigenvalue of P⁻¹H above which the steps grow.
        rate: the largest learning rate of all groups, for which the threshold holds.
        scales: 1/P of each parameter, including the ratios of learning rates to `rate`; None if P is the identity.
    """

    threshold: float
    rate: float
    scales: tuple[Tensor, ...] | None


def stability(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Stability:
    """Return the threshold of an optimizer in its current state, before its next step on `parameters`.

    On a quadratic with Hessian H, gradient descent is stable below 2/η, with momentum β below 2(1+β)/η, and in
    Nesterov's form below (2+2β)/((1+2β)η) (Cohen et al. 2021, arXiv 2103.00065). Adam's preconditioner is
    P = (1−β₁ᵗ)(√(ν/(1−β₂ᵗ)) + ε) and its threshold for P⁻¹H is (2+2β₁)/((1−β₁)η), 38/η at β₁ = 0.9 (Cohen et al. 2022,
    arXiv 2207.14484); Adagrad's are √Σg² + ε and 2/η. Weight decay only counts if it is part of the differentiated
    loss.

    Raises:
        ValueError: if no threshold is known, the optimizer does not hold all parameters, or has not taken a step yet.
    """
    kind = next((kind for kind in KINDS if isinstance(optimizer, kind)), None)
    if kind is None:
        raise ValueError(f"no threshold of stability is known for {type(optimizer).__name__}")
    owners = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    if any(id(p) not in owners for p in parameters):
        raise ValueError("the sharpness is taken over parameters that the optimizer does not hold")
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise ValueError("the optimizer maximizes, and stability is defined for minimization")
    read, limit = KINDS[kind]
    groups = [owners[id(p)] for p in parameters]
    limits = {limit(group) for group in groups}
    if len(limits) > 1:
        raise ValueError("no threshold is known for groups of parameters with different momentum")
    if not parameters:
        raise ValueError("there is no parameter")
    rates = [_rate(group, optimizer.state.get(p, {})) for p, group in zip(parameters, groups, strict=True)]
    top = max(rates)
    if not top > 0:
        raise ValueError("the learning rate is 0: nothing is unstable")
    scales: tuple[Tensor, ...] | None = None
    if read is not _plain or min(rates) != top:
        scales = tuple(
            rate / top / read(p, group, optimizer.state.get(p, {}))
            for p, group, rate in zip(parameters, groups, rates, strict=True)
        )
    return Stability(limits.pop() / top, top, scales)


def _plain(parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
    return torch.ones_like(parameter)


def _of_adam(parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
    if "exp_avg_sq" not in state:
        raise ValueError("the optimizer has no second moments before its first step")
    moment = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
    first, second = (_corrected(float(beta), state["step"]) for beta in group["betas"])
    scale: Tensor = first * ((moment / second).sqrt() + group["eps"])
    return scale


def _corrected(beta: float, step: Tensor | float) -> Tensor:
    """Return 1 - βᵗ on the device of t, where fused optimizers count, without synchronising."""
    return -torch.expm1(torch.as_tensor(step) * (math.log(beta) if beta else -math.inf))


def _of_adagrad(parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
    if not float(state.get("step", 0)):
        raise ValueError("the optimizer has no sum of squares before its first step")
    scale: Tensor = state["sum"].sqrt() + group["eps"]
    return scale


def _rate(group: dict[str, Any], state: dict[str, Any]) -> float:
    decay = group.get("lr_decay", 0.0)
    return float(group["lr"]) / (1 + float(state.get("step", 0)) * decay if decay else 1.0)


def _of_momentum(group: dict[str, Any]) -> float:
    momentum = float(group["momentum"])
    # torch's dampening scales the contribution of each gradient.
    return 2 * (1 + momentum) / ((1 + 2 * momentum) if group["nesterov"] else (1 - group["dampening"]))


def _of_average(group: dict[str, Any]) -> float:
    beta = float(group["betas"][0])
    return 2 * (1 + beta) / (1 - beta)


Read = Callable[[Tensor, dict[str, Any], dict[str, Any]], Tensor]
# For each kind of optimizer, P of a parameter, and the threshold times the learning rate. AdamW is a subclass of Adam.
KINDS: dict[type[Optimizer], tuple[Read, Callable[[dict[str, Any]], float]]] = {
    SGD: (_plain, _of_momentum),
    Adam: (_of_adam, _of_average),
    Adagrad: (_of_adagrad, lambda group: 2.0),
}
