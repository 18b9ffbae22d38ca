"""LayerScale."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attend.core import Call, Method, MethodState, Site
from headwise.attend.methods.layer_input import branch_channels


class LayerScale(Method):
    """Multiplies each channel of the attention branch by a learned factor that starts small.

    Touvron et al. 2021, arXiv 2103.17239 (CaiT).

    gain⊙y where the branch enters the residual, in training and evaluation. `start` is the initial value of all gains:
    0.1 up to 18 layers in CaiT, 1e-5 up to 24 and 1e-6 beyond; with 1 nothing changes at first.
    """

    start: float = 1e-5

    neutral = {"start": 1.0}
    strong = {"start": 0.1}
    acts = "both"
    learns = True
    shapes = ("hidden",)

    def check(self) -> None:
        self.require(0 < self.start < float("inf"), f"start must be positive and finite, got {self.start}")

    def build(self, site: Site, state: MethodState) -> None:
        state.parameter("gain", torch.full((branch_channels(site, "LayerScale"),), self.start, dtype=torch.float32))

    def branch(self, y: Tensor, call: Call) -> Tensor:
        return y * call.state(self).tensor("gain").to(y.dtype)
