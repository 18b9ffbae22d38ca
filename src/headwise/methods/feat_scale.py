"""FeatScale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.core.method import Method
from headwise.projections import ProjectionError

if TYPE_CHECKING:
    from headwise.core.call import Call
    from headwise.core.site import Site
    from headwise.regularizing.fitted_site import Store


class FeatScale(Method):
    """Scales the mean over tokens and the rest of the branch's output apart, by learned factors per channel.

    Wang et al. 2022, arXiv 2203.05962.

    y' = y + mean_gain⊙mean(y) + rest_gain⊙(y - mean(y)), after the output projection and before the residual, in training
    and evaluation; both gains start at 0, where nothing changes. The term is added once, as in the paper (one of the
    authors' files adds it twice). The mean runs over the tokens a query may see: real ones under padding, the past under
    causality.
    """

    neutral = {}
    strong = {}
    acts = "both"
    learns = True
    shapes = ("hidden",)

    def refuse(self, site: Site) -> str | None:
        if site.is_cross:
            return "its mean over tokens would run over the decoder's future ones, which no mask of a cross attention tells"
        if site.causal:
            return "its mean over tokens needs all of them, and a causal layer generates with only the new one at hand"
        if site.pooled:
            return "its mean over tokens needs queries and keys of the same tokens, and this layer pools one of them"
        if site.windowed:
            return "its mean over tokens would be one over a window"
        return None

    def build(self, site: Site, store: Store) -> None:
        channels = _channels(site)
        store.parameter("mean_gain", torch.zeros(channels))
        store.parameter("rest_gain", torch.zeros(channels))

    def branch(self, y: Tensor, call: Call) -> Tensor:
        if call.queries != call.keys:
            raise ValueError(
                f"FeatScale needs all tokens of the layer at {call.site.name}, got {call.queries} queries and {call.keys} keys; "
                "run it without a cache (use_cache=False) and without extra keys"
            )
        store = call.store(self)
        mean = call.mean_over_keys(y.unsqueeze(1)).squeeze(1)
        return y + store.mean_gain.to(y.dtype) * mean + store.rest_gain.to(y.dtype) * (y - mean)


def _channels(site: Site) -> int | None:
    """Give the channels that leave the layer: in hierarchical models not always those that enter it."""
    try:
        return site.projections().need("o", "FeatScale")[0].weight().shape[1]
    except ProjectionError:
        return site.hidden
