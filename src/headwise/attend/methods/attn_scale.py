"""AttnScale."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attend.attention.means import from_mean
from headwise.attend.core import Attend, Call, Method, MethodState, Site


class AttnScale(Method):
    """Scales the part of the attention weights that differs from uniform, by a learned factor per head.

    Wang et al. 2022, arXiv 2203.05962.

    A' = U + (1 + gain)·(A - U) with U uniform over the allowed keys, in training and evaluation. The gain starts at 0,
    where nothing changes; a gain of -g equals `RelaxedAttention(gamma=g)`. Matrix-free as (1 + gain)·A·V -
    gain·mean(V), exact if the host drops no weights.
    """

    neutral = {}
    acts = "both"
    negative = "makes"
    learns = True
    shapes = ("heads",)
    rowwise = True

    def build(self, site: Site, state: MethodState) -> None:
        assert site.heads is not None  # the plan refuses sites without what `shapes` names
        state.parameter("gain", torch.zeros(site.heads, dtype=torch.float32))

    def weights(self, a: Tensor, call: Call) -> Tensor:
        gain = call.state(self).tensor("gain").to(a.dtype)[:, None, None]
        uniform = call.uniform().to(a.dtype)
        return uniform + (1 + gain) * (a - uniform)

    def attend(self, attend: Attend, call: Call) -> Attend:
        return from_mean(attend, call.state(self).tensor("gain"), call)
