"""Readings on the matrix: row statistics of the logits that act and of the weights they make."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.core.call import Call
from headwise.core.precision import at_least_fp32


class MatrixReadings:
    """What a method may read of A where the matrix is made: of a whole call or of a block of its queries."""

    def __init__(self, call: Call, logits: Tensor, weights: Tensor) -> None:
        self.call, self.logits, self.weights = call, logits, weights

    def lse(self) -> Tensor:
        """Return the log-sum-exp of each row of logits, (B, H, T) in fp32 or wider, differentiable; 0 in a row without
        any key."""
        none = (self.logits == float("-inf")).all(-1)
        allowed = self.call.allowed()
        if allowed is not None:
            # An additive mask leaves its own level there, the lowest number of a dtype often, whose square is infinite.
            none = none | ~allowed.any(-1)
        # Filled before the sum too: the gradient of a row of -inf is nan.
        return self.logits.masked_fill(none[..., None], 0.0).logsumexp(-1).masked_fill(none, 0.0)

    def entropy(self) -> Tensor:
        """Return the entropy of each row in nats, (B, H, T) in fp32 or wider, differentiable; 0 in a row without any
        key."""
        a = at_least_fp32(self.weights)
        # The clamp keeps the gradient finite where a weight is 0.
        return -(a * a.clamp(min=torch.finfo(a.dtype).tiny).log()).sum(-1)

    def sum_of_squares(self) -> Tensor:
        """Return the sum of squared weights of each row, (B, H, T) in fp32 or wider, differentiable."""
        return at_least_fp32(self.weights).square().sum(-1)

    def attend(self, z: Tensor) -> Tensor:
        """Return A z for z (B, H, N, D), in the dtype of z."""
        return self.weights.to(z.dtype) @ z
