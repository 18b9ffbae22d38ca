"""What a method's matrix-free form is written with: dropped elements, edits of logits, readings of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Dropping:
    """Single attention weights that a method drops, as `Call.dropping` describes them to the matrix-free computation.

    Attributes:
        key, salt: of the draw, as in `random_draws`; 0-d in int64, and an integer.
        p: probability that a window of dropped keys starts at an element, 0-d.
        window: number of neighbouring keys that are dropped together.
        renormalize: whether the remaining weights of a row are divided by their sum, and the first key comes back to a
            row that would lose all; else they are divided by 1 - p.
        samples: number of draws along the batch.
    """

    key: Tensor
    salt: int
    p: Tensor
    window: int
    renormalize: bool
    samples: int


@dataclass(frozen=True)
class LogitEdit:
    """An edit of the logits s that kernels know, as a method's `edit` describes it.

    Attributes:
        kind: "cap" for c·tanh(s / c), "past" for s + c_i - c_j, "between" for s - |c_i - c_j|, "stable" for the same
            softmax whose exponents are lowered where a row's largest logit repeats, by the factor c, and "pick" for
            weights relu(exp(s) - 1) over c plus the row's sum of |exp(s) - 1|, in place of a softmax.
        by: c; 0-d, or for "past" and "between" (B, N, H) in fp32, where it gets a gradient.
    """

    kind: Literal["cap", "past", "between", "stable", "pick"]
    by: Tensor


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

    def overlap(self) -> Tensor | None:
        """Return the sum over pairs of heads of ‖A_iᵀA_j‖² of each sample, (B,), or None if that needs the matrix.

        Queries that are not real do not count.
        """
        ...

    def weights_at(self, positions: Tensor) -> Tensor:
        """Return the weights of the queries at `positions` (B, n) as (B, H, n, N)."""
        ...

    def at(self, positions: Tensor) -> RowReadings:
        """Return the readings of the queries at `positions` (B, n) of a whole call, computed from these alone."""
        ...
