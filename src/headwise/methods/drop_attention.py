"""DropAttention."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.core.call import Call
from headwise.core.method import Method
from headwise.methods.kept_keys import kept_keys


class DropAttention(Method):
    """Drops attention weights after the softmax and scales the rest of each row up to the sum it had, which is 1.

    Zehui et al. 2019, arXiv 1907.11065.

    `unit="column"` drops keys for all queries of a head, `"element"` each weight apart; `window` neighbouring keys fall
    together, a fall starting with probability p / window. The paper likes columns with a large p and a small window.
    Rescaling with its gradient equals removing the key before the softmax, so columns run matrix-free as a mask;
    elements need the matrix. With `detach_normalizer=True` (no gradient through the row's sum; a later study found it
    the worst variant) the matrix is needed too. A query that would lose every key it may see gets the first of them
    back.
    """

    p: float = 0.1
    window: int = 1
    unit: str = "column"
    detach_normalizer: bool = False

    neutral = {"p": 0.0}
    strong = {"p": 0.7}
    live = ("p",)
    random = True
    rowwise = True

    def check(self) -> None:
        self.require(0 <= self.p < 1, f"p must lie in [0, 1), got {self.p}")
        self.require(self.window >= 1, f"window must be at least 1, got {self.window}")
        self.choose("unit", "column", "element")

    def weights(self, a: Tensor, call: Call) -> Tensor:
        kept = a * self._kept(call).to(a.dtype)
        # A row has what it had, which is 1 unless a method before this one took weight away. Sizes are summed: where
        # one made weights negative, their sum may be nearly 0.
        before, total = a.abs().sum(-1, keepdim=True), kept.abs().sum(-1, keepdim=True)
        if call.sinks is not None:
            # The sink's weight stands in no column of `a`, is never dropped, and is part of the row's sum.
            before, total = torch.ones_like(total), total + (1 - before)
        share = before / total.masked_fill(total == 0, 1.0)
        return kept * (share.detach() if self.detach_normalizer else share)

    def keep(self, call: Call) -> Tensor | None:
        if self.unit == "element" or self.detach_normalizer:
            return None
        return self._kept(call)

    def _kept(self, call: Call) -> Tensor:
        return kept_keys(self, call, call.value(self, "p"), self.unit, self.window)
