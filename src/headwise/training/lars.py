"""LARS, which torch does not have: SGD with momentum whose steps are scaled layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class LARS(torch.optim.Optimizer):
    """Scale the step of each matrix by trust·‖w‖/(‖g‖ + decay·‖w‖); vectors take plain steps of SGD.

    You, Gitman and Ginsburg 2017, arXiv 1708.03888. As usual with it, gains and biases (fewer than two dimensions) are not
    scaled: their norms say little. A matrix or gradient of zeros is not scaled either.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        nesterov: bool = False,
        trust: float = 0.001,
        weight_decay: float = 0.0,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "trust": trust, "weight_decay": weight_decay}
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; gives the loss of `closure` where there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)
        return loss

    def _move(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        update = gradient.add(parameter, alpha=group["weight_decay"])
        if parameter.ndim > 1:
            update.mul_(_scale(parameter, gradient, group))
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        # the rate stands inside the sum, as in the paper: a rate that changes does not rescale what was summed
        moved = state["momentum"].mul_(group["momentum"]).add_(update, alpha=float(group["lr"]))
        if group["nesterov"]:
            moved = moved * group["momentum"] + update * group["lr"]
        parameter.sub_(moved)


def _scale(parameter: Tensor, gradients: Tensor, group: dict[str, Any]) -> Tensor:
    weight, gradient = parameter.norm(), gradients.norm()
    scale = group["trust"] * weight / (gradient + group["weight_decay"] * weight)
    return torch.where((weight > 0) & (gradient > 0), scale, torch.ones_like(scale))
