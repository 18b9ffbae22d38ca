"""Readings of the attention weights that do not need the T x N matrix."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RowReadings(Protocol):
    """Differentiable readings of the attention weights A, after masks and logit edits and before weight edits.

    Each is computed on request, and is the same with and without the matrix. Weights include the effect of a sink; the
    rows of logits do not include the sink's logit. In a block of queries the readings hold the rows of that block.
    """

    def lse(self) -> Tensor:
        """Return the log-sum-exp of each row of logits, (B, H, T); 0 in a row without allowed keys."""
        ...

    def entropy(self) -> Tensor:
        """Return the entropy of each row in nats, (B, H, T); 0 in a row without allowed keys."""
        ...

    def sum_of_squares(self) -> Tensor:
        """Return the sum of squared weights of each row, (B, H, T)."""
        ...

    def attend(self, z: Tensor) -> Tensor:
        """Return A z for z (B, H, N, D), in the dtype of z."""
        ...
