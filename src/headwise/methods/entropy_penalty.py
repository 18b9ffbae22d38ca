"""EntropyPenalty."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.core.call import Call, RowReadings
from headwise.core.method import Method
from headwise.core.precision import at_least_fp32


class EntropyPenalty(Method):
    """Penalises low attention entropy, or entropy outside a band around a target.

    Attanasio et al. 2022, arXiv 2203.09192 (entropy-based attention regularization); the band: Jha and Reagen 2025,
    arXiv 2501.03489 (Entropy-Guided Attention).

    Without a target: strength · mean(-H) in nats over real queries and heads, summed over layers. With a `target`:
    (H - target·log n)² if H is further than band·log n from target·log n, else 0, where n is the number of keys that
    the query may see (the paper learns a target per head). `head_mean=True` uses the entropy of a second softmax over
    the head-averaged weights, which hardly varies (about 2.72 to 2.77 at 16 keys), and averages over the real queries
    of each sentence and then over sentences, both as in the code of the first paper; it needs the matrix. Otherwise
    matrix-free.
    """

    strength: float = 0.01
    target: float | None = None
    band: float = 0.2
    head_mean: bool = False

    neutral = {"strength": 0.0}
    strong = {"strength": 10.0}
    live = ("strength",)
    penalizes = True
    rowwise = True

    def check(self) -> None:
        self.require(self.strength >= 0, f"strength must be at least 0, got {self.strength}")
        number = isinstance(self.target, (int, float)) and not isinstance(self.target, bool)
        inside = self.target is None or (number and 0 <= self.target <= 1)
        self.require(inside, f"target is a share of log(allowed keys) and must lie in [0, 1], got {self.target!r}")
        self.require(self.band >= 0, f"band must be at least 0, got {self.band}")

    def read(self, a: Tensor, call: Call) -> None:
        if self.head_mean:
            a = _second_softmax(a, call)
        # The clamp keeps the gradient finite where a weight is 0.
        a = at_least_fp32(a)
        logs = a.clamp(min=torch.finfo(a.dtype).tiny).log()
        self._penalize(-(a * logs).sum(-1), call)

    def read_free(self, rows: RowReadings, call: Call) -> Any:
        if self.head_mean:
            return NotImplemented
        return self._penalize(rows.entropy(), call)

    def _penalize(self, entropy: Tensor, call: Call) -> None:
        strength, per = call.value(self, "strength"), "query of sample" if self.head_mean else "query"
        if self.target is None:
            return call.penalize(self, -strength * entropy, per)
        largest = call.allowed_counts().to(entropy.dtype).log().squeeze(-1)
        off = entropy - self.target * largest
        return call.penalize(self, strength * off.square().masked_fill(off.abs() <= self.band * largest, 0.0), per)


def _second_softmax(a: Tensor, call: Call) -> Tensor:
    mean, allowed = at_least_fp32(a).mean(1, keepdim=True), call.allowed()
    if allowed is None:
        return mean.softmax(-1)
    allowed = allowed.any(1, keepdim=True)
    # A finite number, as -inf would give nan for queries without allowed keys, whose rows do not count.
    return mean.masked_fill(~allowed, torch.finfo(mean.dtype).min).softmax(-1) * allowed
