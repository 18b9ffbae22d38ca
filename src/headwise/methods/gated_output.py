"""GatedOutput."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from headwise.core.method import Method

if TYPE_CHECKING:
    from headwise.core.call import Call
    from headwise.core.method_state import MethodState
    from headwise.core.site import Site


class GatedOutput(Method):
    """Multiplies the output of each head by a learned sigmoid gate of the layer's input.

    Qiu et al. 2025, arXiv 2505.06708.

    out⊙σ(x·W + b) before the output projection, in training and evaluation; one gate per head, or with `per="element"`
    one per channel of a head. W starts at 0 and b at 4, so that every gate starts at 0.982 and a trained model hardly
    changes (the paper trains from scratch and starts near ½).
    """

    per: str = "head"

    no_neutral = "a sigmoid gate is never exactly 1; it starts at 0.982"
    acts = "both"
    learns = True

    def check(self) -> None:
        self.choose("per", "head", "element")

    def build(self, site: Site, state: MethodState) -> None:
        assert site.heads and site.head_dim and site.hidden  # the plan refuses sites without what `shapes` names
        gates = site.heads * (site.head_dim if self.per == "element" else 1)
        state.parameter("weight", torch.zeros(gates, site.hidden))
        state.parameter("bias", torch.full((gates,), 4.0))

    def output(self, o: Tensor, call: Call) -> Tensor:
        state, x = call.state(self), call.hidden
        if x is None or x.shape[:2] != (o.shape[0], o.shape[2]):
            shape = None if x is None else tuple(x.shape)
            raise ValueError(
                f"GatedOutput needs the layer's input (B, T, C) with one token a query at {call.site.name}, got {shape} for "
                f"{o.shape[0]} rows of {o.shape[2]} queries: the layer cuts windows, or pools its queries; leave it out with where="
            )
        gate = torch.sigmoid(F.linear(x, state.tensor("weight").to(x.dtype), state.tensor("bias").to(x.dtype)))
        return o * gate.unflatten(-1, (call.heads, -1)).transpose(1, 2).to(o.dtype)
