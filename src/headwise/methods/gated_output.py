"""GatedOutput."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headwise.core.call import Call
from headwise.core.method import Method
from headwise.core.method_state import MethodState
from headwise.core.site import Site
from headwise.files.arguments import is_a
from headwise.methods.layer_input import JOINT, tokens_of_queries


class GatedOutput(Method):
    """Multiplies the output of each head by a learned sigmoid gate of the layer's input.

    Qiu et al. 2025, arXiv 2505.06708.

    out⊙σ(x·W + b) before the output projection, in training and evaluation, with x the layer's input; one gate per
    head, or with `per="element"` one per channel of a head. W starts at 0, and `start` determines the initial gate:
    "open" has b = 4, so that every gate starts at 0.982 and a trained model hardly changes (the paper trains from
    scratch and starts near ½); "half" is σ(x·W) without b, at ½; "one" is 2σ(x·W), at exactly 1, so that a trained
    model does not change at first, and gates may reach 2. With `channels` the gate reads only the first channels of the
    input: 12 of them with "half" are the sparse gate of pull request 117 of KellerJordan/modded-nanogpt (2025).
    """

    per: str = "head"
    start: str = "open"
    channels: int | None = None

    neutral = {"start": "one"}
    acts = "both"
    learns = True

    def check(self) -> None:
        self.choose("per", "head", "element")
        self.choose("start", "open", "half", "one")
        is_a("channels", self.channels, (int, type(None)), "a whole number or None")
        self.require(self.channels is None or self.channels >= 1, f"channels must be at least 1, got {self.channels}")

    def refuse(self, site: Site) -> str | None:
        if site.joint:
            return JOINT
        if self.channels is None or site.hidden is None or self.channels <= site.hidden:
            return None
        return f"reads the first {self.channels} channels of its input, and this layer's has {site.hidden}"

    def build(self, site: Site, state: MethodState) -> None:
        assert site.heads and site.head_dim and site.hidden  # the plan refuses sites without what `shapes` names
        gates = site.heads * ((site.value_dim or site.head_dim) if self.per == "element" else 1)
        state.parameter("weight", torch.zeros(gates, self.channels or site.hidden))
        if self.start == "open":
            state.parameter("bias", torch.full((gates,), 4.0))

    def output(self, o: Tensor, call: Call) -> Tensor:
        state, x = call.state(self), tokens_of_queries(self, call)[..., : self.channels]
        bias = state.tensor("bias").to(x.dtype) if self.start == "open" else None
        gate = torch.sigmoid(F.linear(x, state.tensor("weight").to(x.dtype), bias)) * (2 if self.start == "one" else 1)
        if gate.shape[-1] not in (call.heads, call.heads * o.shape[-1]):
            raise ValueError(
                f"GatedOutput was fitted to {gate.shape[-1] // call.heads} channels of a head at {call.site.name}, and "
                f"its output has {o.shape[-1]}: pass example=batch to regularize(), which tells their number"
            )
        return o * gate.unflatten(-1, (call.heads, -1)).transpose(1, 2).to(o.dtype)
