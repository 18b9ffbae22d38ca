"""GatedNorm."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attend.attention.low_rank_gates import low_rank_gated_tokens, with_inner
from headwise.attend.core import Call, Method, MethodState, Site
from headwise.attend.methods.gates import STARTS, drawn, factor_of
from headwise.attend.methods.layer_input import JOINT


class GatedNorm(Method):
    """Multiplies the layer's normalised input by a learned low-rank sigmoid gate of itself.

    Qiu et al. 2026, arXiv 2601.22966.

    y⊙σ(U·silu(D·y) + b) in training and evaluation, with y the layer's input: in pre-norm models what the norm gives
    to queries, keys and values. Models that need no outliers in the stream to scale a norm have lower ones. U starts
    at 0, D at random, and `start` determines the first gate: "half" is the paper's gate without b, at ½; "open" has
    b = 4, so that it starts at 0.982; "one" is 2σ without b, at exactly 1, so that a trained model does not change at
    first. The paper gates after every norm of a model, here only before attention; under cross attention the queries'
    input alone.
    """

    rank: int = 16
    start: str = "half"

    neutral = {"start": "one"}
    acts = "both"
    learns = True
    shapes = ("hidden",)

    def check(self) -> None:
        self.require(self.rank >= 1, f"rank must be at least 1, got {self.rank}")
        self.choose("start", *STARTS)

    def refuse(self, site: Site) -> str | None:
        return JOINT if site.joint else None

    def build(self, site: Site, state: MethodState) -> None:
        assert site.hidden  # the plan refuses sites without what `shapes` names
        state.parameter("down", drawn((self.rank, site.hidden), state.seed, "GatedNorm", site.index))
        state.parameter("up", torch.zeros(site.hidden, self.rank, dtype=torch.float32))
        if self.start == "open":
            state.parameter("bias", torch.full((site.hidden,), 4.0, dtype=torch.float32))

    def hidden(self, x: Tensor, call: Call) -> Tensor:
        state = call.state(self)
        bias = state.tensor("bias").to(x.dtype) if self.start == "open" else None
        x, inner = with_inner(x, state.tensor("down").to(x.dtype))
        return low_rank_gated_tokens(x, inner, state.tensor("up").to(x.dtype), bias, factor_of(self.start))
