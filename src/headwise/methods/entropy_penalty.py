"""EntropyPenalty."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise.core.method import Method

if TYPE_CHECKING:
    from headwise.core.call import Call
    from headwise.regularizing.fitted_site import Rows


class EntropyPenalty(Method):
    """Penalises low attention entropy, or entropy outside a band around a target.

    Attanasio et al. 2022, arXiv 2203.09192 (entropy-based attention regularization).

    Without a target: strength · mean(-H) in nats over real queries and heads, summed over layers. With a `target`:
    (H - target·log n)² where H lies further than band·log n from target·log n, 0 inside; n counts the keys the query may
    see. `head_mean=True` takes the entropy of a second softmax over the head-averaged weights, as the authors' code does
    (it hardly moves: about 2.72 to 2.77 at 16 keys); it needs the matrix, the rest runs matrix-free.
    """

    strength: float = 0.01
    target: float | None = None
    band: float = 0.2
    head_mean: bool = False

    neutral = {"strength": 0.0}
    strong = {"strength": 10.0}
    live = ("strength",)
    penalizes = True

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
        logs = a.float().clamp(min=torch.finfo(torch.float32).tiny).log()
        self._penalize(-(a * logs).sum(-1), call)

    def read_free(self, rows: Rows, call: Call) -> Any:
        if self.head_mean:
            return NotImplemented
        return self._penalize(rows.entropy(), call)

    def _penalize(self, entropy: Tensor, call: Call) -> None:
        strength = call.value(self, "strength")
        if self.target is None:
            return call.penalize(self, -strength * entropy)
        largest = call.allowed_counts().log().squeeze(-1)
        away = entropy - self.target * largest
        return call.penalize(self, strength * away.square().masked_fill(away.abs() <= self.band * largest, 0.0))


def _second_softmax(a: Tensor, call: Call) -> Tensor:
    mean, allowed = a.float().mean(1, keepdim=True), call.allowed()
    if allowed is None:
        return mean.softmax(-1)
    allowed = allowed.any(1, keepdim=True)
    # Finite instead of -inf: a query without keys stays free of nan, and its row is no real query's.
    return mean.masked_fill(~allowed, torch.finfo(torch.float32).min).softmax(-1) * allowed
