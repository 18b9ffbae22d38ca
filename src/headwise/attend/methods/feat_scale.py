"""FeatScale."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attend.attention.means import by_channel
from headwise.attend.core import Call, Method, MethodState, Site
from headwise.attend.methods.layer_input import branch_channels


class FeatScale(Method):
    """Scales the mean over tokens and the rest of the branch's output separately, by learned factors per channel.

    Wang et al. 2022, arXiv 2203.05962.

    y' = y + mean_gain⊙mean(y) + rest_gain⊙(y - mean(y)) where the branch enters the residual: after the output
    projection and its dropout, before a LayerScale and stochastic depth, as in the authors' code, in training and
    evaluation. Hosts that apply this dropout by a function call, after which no code can be inserted, are refused
    unless it is 0. Both gains start at 0, where nothing changes. The term is added once, as in the paper (one of the
    authors' files adds it twice). The mean is over the tokens that a query may see: real ones under padding, the past
    under causality.
    """

    neutral = {}
    acts = "both"
    learns = True
    shapes = ("hidden",)

    def refuse(self, site: Site) -> str | None:
        if site.is_cross:
            return "averages over tokens, and a cross attention does not mask the decoder's future ones"
        if site.causal:
            return "averages over all tokens, and a causal layer generates with only the new one present"
        if site.pooled:
            return "averages over the tokens of both queries and keys, and this layer pools one of them"
        if site.windowed:
            return "averages over all tokens, and this layer sees windows"
        return None

    def build(self, site: Site, state: MethodState) -> None:
        channels = branch_channels(site, "FeatScale")
        state.parameter("mean_gain", torch.zeros(channels, dtype=torch.float32))
        state.parameter("rest_gain", torch.zeros(channels, dtype=torch.float32))

    def branch(self, y: Tensor, call: Call) -> Tensor:
        if call.queries != call.keys:
            raise ValueError(
                f"FeatScale needs all tokens of the layer at {call.site.name}, got {call.queries} queries and "
                f"{call.keys} keys; run it without a cache (use_cache=False) and without extra keys"
            )
        state = call.state(self)
        return by_channel(y, state.tensor("mean_gain"), state.tensor("rest_gain"), call)
