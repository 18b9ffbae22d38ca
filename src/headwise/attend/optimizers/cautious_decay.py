"""Cautious weight decay: only where the optimizer's update also moves a weight towards zero."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attend.optimizers.attached import DECAY, Attached, check_optimizer
from headwise.borders import on_all

COUPLED = ("SGD", "ASGD", "Adagrad", "RMSprop", "Adadelta", "Adamax")


class CautiousDecay(Attached):
    """Applies an optimizer's weight decay only to weights that its update moves towards zero.

    x ← x - η(u + λ·1[u·x >= 0]·x) entry by entry, with the optimizer's update u, its learning rate η and the weight
    decay λ of its groups: Chen et al. 2025, arXiv 2510.12402. The decays move from the groups' `weight_decay`, which
    becomes 0, to their `cautious_decay`. A copy of the decayed weights is held during a step.

    Args:
        optimizer: any with decoupled weight decay, such as `torch.optim.AdamW` or `headwise.Muon`.

    Raises:
        TypeError, ValueError: if it is no optimizer, decays nothing, or adds its decay to the gradient.

    Example:
        >>> import torch, headwise
        >>> optimizer = torch.optim.AdamW(torch.nn.Linear(4, 4).parameters(), weight_decay=0.1)
        >>> cautious = headwise.CautiousDecay(optimizer)
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        check_optimizer(optimizer)
        refuse_coupled(optimizer, "CautiousDecay")
        super().__init__(optimizer)
        groups = optimizer.param_groups
        if not any(group.get("weight_decay") or group.get(DECAY) for group in groups):
            raise ValueError("CautiousDecay finds no weight decay in the optimizer's groups: set weight_decay above 0")
        self._attach()
        self._take()
        self._copies: list[list[Tensor]] = []

    def remove(self) -> None:
        """Return the decays to the optimizer, which then applies them to all weights."""
        if self._hooks:
            for group in self.optimizer.param_groups:
                if DECAY in group:
                    group["weight_decay"] = group.pop(DECAY)
        super().remove()

    def _take(self) -> None:
        for group in self.optimizer.param_groups:
            if group.get("weight_decay"):
                group[DECAY], group["weight_decay"] = group["weight_decay"], 0.0

    @torch.no_grad()
    def _before(self, closure: bool) -> None:
        # A schedule, or a state from before this was attached, may have set decays.
        self._take()
        self._copies = [
            [p.detach().clone() for p in group["params"]] if group.get(DECAY) else []
            for group in self.optimizer.param_groups
        ]

    @torch.no_grad()
    def _after(self) -> None:
        for group, before in zip(self.optimizer.param_groups, self._copies, strict=True):
            pairs = [(p, old) for p, old in zip(group["params"], before, strict=False) if p.grad is not None]
            if not pairs:
                continue
            weights, old = [p for p, _ in pairs], [x for _, x in pairs]
            # Signs, because the product of two small numbers is zero.
            agree = on_all("sub")(old, weights)
            on_all("sign_")(agree)
            on_all("mul_")(agree, on_all("sign")(old))
            # 0 where they disagree, else 1
            on_all("add_")(agree, 1)
            on_all("clamp_max_")(agree, 1)
            on_all("mul_")(agree, old)
            on_all("mul_")(agree, group["lr"] * group[DECAY])
            on_all("sub_")(weights, agree)
        self._copies = []


def refuse_coupled(optimizer: torch.optim.Optimizer, who: str) -> None:
    """Raise ValueError if an optimizer adds its decay to the gradient, where no step of its own is left to compare."""
    coupled = tuple(getattr(torch.optim, name) for name in COUPLED)
    adam = isinstance(optimizer, torch.optim.Adam | torch.optim.NAdam | torch.optim.RAdam)
    decoupled = all(group.get("decoupled_weight_decay", False) for group in optimizer.param_groups)
    if isinstance(optimizer, coupled) or (adam and not decoupled):
        raise ValueError(
            f"{who} needs an optimizer whose weight decay is decoupled; {type(optimizer).__name__} adds it to the "
            "gradient: use AdamW or Muon"
        )
