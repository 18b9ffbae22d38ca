"""DropAttention."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attend.core import Call, Dropping, Method
from headwise.attend.methods.kept_keys import kept_keys


class DropAttention(Method):
    """Drops attention weights after the softmax and scales the rest of each row up to the sum it had, which is 1.

    Zehui et al. 2019, arXiv 1907.11065.

    `unit="column"` drops keys for all queries of a head, `"element"` each weight separately. `window` neighbouring keys
    are dropped together; such a window starts at a key with probability p / window. The paper prefers columns with a
    large p and a small window. Rescaling, including its gradient, equals removing the keys before the softmax, so
    columns run matrix-free as a mask and elements block by block; `detach_normalizer=True` needs the matrix (no
    gradient through the row's sum; a later study found it the worst variant). A query that would lose all keys it may
    see gets the first of them back.
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
        # Each row keeps its sum, which is 1 unless an earlier method removed weight. The sum is of absolute values,
        # because that of negative and positive weights may be close to 0.
        before, total = a.abs().sum(-1, keepdim=True), kept.abs().sum(-1, keepdim=True)
        if call.sinks is not None:
            # The sink's weight is not in `a`, is never dropped, and is part of the row's sum.
            before, total = torch.ones_like(total), total + (1 - before)
        share = before / total.masked_fill(total == 0, 1.0)
        return kept * (share.detach() if self.detach_normalizer else share)

    def keep(self, call: Call) -> Tensor | None:
        if self.unit == "element" or self.detach_normalizer:
            return None
        return self._kept(call)

    def drop(self, call: Call) -> Dropping | None:
        if self.detach_normalizer:
            return None
        return call.dropping(self, call.value(self, "p") / self.window, window=self.window, renormalize=True)

    def _kept(self, call: Call) -> Tensor:
        return kept_keys(self, call, call.value(self, "p"), self.unit, self.window)
