"""ContraNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attend.attention.wide_head import mean_of_similar
from headwise.attend.core import Call, Method, MethodState, Site
from headwise.attend.methods.layer_input import branch_channels
from headwise.numerics.kernels import rows_by_kernel

# Epsilon of the layer norm, as in the authors' code.
EPS = 1e-6


class ContraNorm(Method):
    """Moves each token of the attention branch away from the mean of the tokens that are like it.

    Guo et al. 2023, arXiv 2303.06562.

    x - strength·softmax(x̂x̂ᵀ/temperature)·x with x̂ the tokens at length 1, or with `identity=True` (the authors' form
    for BERT) (1 + strength)·x minus the same, in training and evaluation. It acts where the branch enters the residual,
    the third of the positions in the authors' code, which tried strengths from 0.005 to 0.2. `norm=True` adds a learned
    layer norm after it, as in their vision transformers. The softmax runs over the tokens that a query may see, whereas
    the original includes padding and later tokens. One fused call, no matrix. Calls with a cache, which does not hold
    the branch of earlier tokens, are refused.
    """

    strength: float = 0.1
    temperature: float = 1.0
    identity: bool = True
    norm: bool = False

    neutral = {"strength": 0.0}
    strong = {"strength": 1.0}
    live = ("strength",)
    acts = "both"
    learns = True
    self_only = True
    shapes = ("hidden",)

    def check(self) -> None:
        self.require(self.strength >= 0, f"strength must be at least 0, got {self.strength}")
        self.require(self.temperature > 0, f"temperature must be above 0, got {self.temperature}")

    def refuse(self, site: Site) -> str | None:
        return "compares all tokens, and this layer's windows separate them" if site.windowed else None

    def build(self, site: Site, state: MethodState) -> None:
        if self.norm:
            channels = branch_channels(site, "ContraNorm")
            state.parameter("gain", torch.ones(channels, dtype=torch.float32))
            state.parameter("shift", torch.zeros(channels, dtype=torch.float32))

    def branch(self, y: Tensor, call: Call) -> Tensor:
        if call.queries != call.keys:
            raise ValueError(
                f"ContraNorm needs all tokens of the layer at {call.site.name}, got {call.queries} queries and "
                f"{call.keys} keys; run it without a cache (use_cache=False) and without extra keys"
            )
        # The kernel takes either a mask or causality; `allowed` combines both.
        mask = None if call.mask is None else call.allowed()
        mean = mean_of_similar(y, 1 / self.temperature, mask, call.causal and call.mask is None)
        moved = self._moved(y, mean, call.value(self, "strength"))
        if not self.norm:
            return moved
        state = call.state(self)
        gain, shift = (state.tensor(name).to(y.dtype) for name in ("gain", "shift"))
        return F.layer_norm(moved, y.shape[-1:], gain, shift, EPS)

    def _moved(self, y: Tensor, mean: Tensor, strength: Tensor) -> Tensor:
        if rows_by_kernel(y) and strength.device.type == "cpu":
            # One pass each way.
            share = -float(strength)
            return torch.lerp(y, mean, share) if self.identity else torch.add(y, mean, alpha=share)
        strength = strength.to(y.dtype)
        return y + strength * (y - mean) if self.identity else y - strength * mean
