"""SSMax."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attend.core import Call, Method, MethodState, Site


class SSMax(Method):
    """Scales the logits of a query by a learned factor times the logarithm of the number of keys it may see.

    Scalable-Softmax: Nakanishi 2025, arXiv 2501.19399.

    n^(s·z) instead of e^z, so that attention does not flatten as the context grows; in training and evaluation. `scale`
    is the initial s of every head (the paper's models learn about 0.43), and its constant value with `learned=False`.
    Matrix-free: it scales the queries. A position bias in the mask is not part of z and is not scaled.
    """

    scale: float = 0.43
    learned: bool = True

    no_neutral = "the factor depends on the number of keys, which differs between queries and contexts"
    strong = {"scale": 2.0}
    acts = "both"
    learns = True
    shapes = ("heads",)

    def check(self) -> None:
        self.require(0 < self.scale < float("inf"), f"scale must be positive and finite, got {self.scale}")

    def has_parameters(self) -> bool:
        return self.learned

    def build(self, site: Site, state: MethodState) -> None:
        assert site.heads is not None  # the plan refuses sites without what `shapes` names
        if self.learned:
            state.parameter("scale", torch.full((site.heads,), self.scale, dtype=torch.float32))
        else:
            state.fill("scale", site.heads, self.scale)

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        scale = call.state(self).tensor("scale")[:, None, None]
        counts = call.allowed_counts().to(torch.promote_types(q.dtype, torch.float32))
        return q * (scale * counts.log()).to(q.dtype), k, v
