"""GFSA."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attend.attention.head_rows import mixed
from headwise.attend.core import Attend, Call, Method, MethodState, Site


class GFSA(Method):
    """Adds a learned multiple of a power of the attention weights to them: attention as a graph filter.

    Choi et al. 2024, arXiv 2312.04234.

    A + gain·(A + (order - 1)(A² - A)) per head, where the second term is a first-order estimate of A^order, in training
    and evaluation; the gain starts at 0, where nothing changes. A²V = A(AV) takes two maps and no matrix. A² does not
    exist with a cache, or if queries and keys are different tokens; such calls are refused.
    """

    order: int = 4

    neutral = {}
    acts = "both"
    negative = "makes"
    learns = True
    self_only = True
    rowwise = False
    shapes = ("heads",)

    def check(self) -> None:
        self.require(self.order >= 2, f"order must be at least 2, got {self.order}")

    def refuse(self, site: Site) -> str | None:
        return (
            "needs queries and keys of the same tokens for A², and this layer pools one of them"
            if site.pooled
            else None
        )

    def build(self, site: Site, state: MethodState) -> None:
        assert site.heads is not None  # the plan refuses sites without what `shapes` names
        state.parameter("gain", torch.zeros(site.heads, dtype=torch.float32))

    def weights(self, a: Tensor, call: Call) -> Tensor:
        self._check_square(call)
        gain = call.state(self).tensor("gain").to(a.dtype)[:, None, None]
        return a + gain * (a + (self.order - 1) * (a @ a - a))

    def attend(self, attend: Attend, call: Call) -> Attend:
        self._check_square(call)

        def filtered(v: Tensor) -> Tensor:
            once = attend(v)
            # gain·(A + (order - 1)(A² - A)), by powers of A
            return mixed(once, attend(once), call.state(self).tensor("gain"), 2 - self.order, self.order - 1)

        return filtered

    def _check_square(self, call: Call) -> None:
        if call.queries != call.keys:
            raise ValueError(
                f"GFSA needs as many queries as keys at {call.site.name}, got {call.queries} and {call.keys}: run it "
                "without a cache (use_cache=False) and without extra keys, or leave it out with where="
            )
