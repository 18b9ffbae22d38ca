"""DropKey."""

from __future__ import annotations

from torch import Tensor

from headwise.attend.core import Call, Dropping, Method, Site
from headwise.attend.methods.kept_keys import kept_keys


class DropKey(Method):
    """Removes randomly chosen keys before the softmax.

    Li et al. 2023, arXiv 2208.02646.

    `unit="element"` draws for each query, head and sample, as in the paper, block by block; `"column"` draws once for
    all queries of a head and runs as a mask. Neither needs the matrix. With `end_p`, p changes linearly with depth to
    `end_p` at the last layer of a stack (the paper found a decreasing p best and does not give its last value). A query
    that would lose all keys it may see gets the first of them back.
    """

    p: float = 0.1
    unit: str = "element"
    end_p: float | None = None

    neutral = {"p": 0.0}
    strong = {"p": 0.7}
    live = ("p",)
    random = True
    rowwise = True

    def check(self) -> None:
        self.require(0 <= self.p < 1, f"p must lie in [0, 1), got {self.p}")
        self.choose("unit", "column", "element")
        number = isinstance(self.end_p, (int, float)) and not isinstance(self.end_p, bool)
        self.require(
            self.end_p is None or (number and 0 <= self.end_p < 1), f"end_p must lie in [0, 1), got {self.end_p!r}"
        )

    def at(self, name: str, step: int, site: Site) -> float:
        if self.end_p is None:
            return float(self.p)
        return self.p + (self.end_p - self.p) * site.relative_depth

    def logits(self, s: Tensor, call: Call) -> Tensor:
        return s.masked_fill(~self._kept(call), float("-inf"))

    def keep(self, call: Call) -> Tensor | None:
        return self._kept(call) if self.unit == "column" else None

    def drop(self, call: Call) -> Dropping:
        return call.dropping(self, call.value(self, "p"), renormalize=True)

    def _kept(self, call: Call) -> Tensor:
        return kept_keys(self, call, call.value(self, "p"), self.unit)
