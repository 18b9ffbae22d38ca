"""What a method may read of the attention weights, with or without the T x N matrix."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RowReadings(Protocol):
    """Readings of A (after masks and logit edits, before weight edits), each differentiable and made when asked for.

    They are of the logits that act and the weights that these make, beside a sink too, whether the matrix is made or
    not. In a block of queries they hold its rows. A sink's logit is in no row of logits.
    """

    def lse(self) -> Tensor:
        """Return the log-sum-exp of each row of logits, (B, H, T); 0 in a row without any key."""
        ...

    def entropy(self) -> Tensor:
        """Return the entropy of each row in nats, (B, H, T); 0 in a row without any key."""
        ...

    def sum_of_squares(self) -> Tensor:
        """Return the sum of squared weights of each row, (B, H, T)."""
        ...

    def attend(self, z: Tensor) -> Tensor:
        """Return A z for z (B, H, N, D), in the dtype of z."""
        ...
