"""Stability: the sharpness of a quadratic above which an optimizer's steps grow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Optimizer


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
        raise ValueError("the optimizer does not hold all parameters that the sharpness is taken in")
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise ValueError("the optimizer maximizes, and stability is defined for minimization")
    read, limit = KINDS[kind]
    groups = [owners[id(p)] for p in parameters]
    limits = {limit(group) for group in groups}
    if len(limits) > 1:
        raise ValueError("groups of parameters with different momentum have no threshold together")
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
