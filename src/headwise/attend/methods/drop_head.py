"""DropHead."""

from __future__ import annotations

from torch import Tensor

from headwise.attend.core import Call, Method, Site


class DropHead(Method):
    """Drops whole heads, and scales the rest up by H / (number that stays).

    Zhou et al. 2020, arXiv 2004.13342.

    Drawn per sample and query head while training, before the output projection. At least one head stays; layers with
    one head are refused. `rescale=False` does not scale the rest: the form of the blog (Meindl 2023), which mentions no
    rescaling. In the paper p falls to 0 and rises again: `regularized.set(DropHead, p=VShape(...))`.
    """

    p: float = 0.2
    rescale: bool = True

    neutral = {"p": 0.0}
    strong = {"p": 0.7}
    live = ("p",)
    random = True

    def check(self) -> None:
        self.require(0 <= self.p < 1, f"p must lie in [0, 1), got {self.p}")

    def refuse(self, site: Site) -> str | None:
        return "always keeps one head, and this layer has no other" if site.heads == 1 else None

    def output(self, o: Tensor, call: Call) -> Tensor:
        factor = call.head_factors(self, call.value(self, "p"), rescale=self.rescale)
        return o * call.per_sample(factor)[:, :, None, None].to(o.dtype)
