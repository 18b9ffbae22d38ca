"""ZLoss."""

from __future__ import annotations

from headwise.attend.core import Call, Method, RowReadings


class ZLoss(Method):
    """Penalises the squared log-sum-exp of each query's logits, which keeps their level near 0.

    The z-loss of PaLM (Chowdhery et al. 2022, arXiv 2204.02311) on the logits of attention instead of those of the
    output.

    strength · mean(L²) over real queries and heads, summed over layers, with L the log-sum-exp of the logits of the
    keys. The logits are those that enter the softmax: with masks, position biases, soft-caps and edits of other
    methods. The logit of a sink, which does not depend on queries and keys, is left out. It limits drift of the logits'
    level and not their spread. Fused attention computes L anyway, so drawn rows would save nothing.
    """

    strength: float = 1e-4

    neutral = {"strength": 0.0}
    strong = {"strength": 10.0}
    live = ("strength",)
    penalizes = True
    rowwise = True

    def check(self) -> None:
        self.require(self.strength >= 0, f"strength must be at least 0, got {self.strength}")

    def read_free(self, rows: RowReadings, call: Call) -> None:
        call.penalize(self, call.value(self, "strength") * rows.lse().square())
