"""Top-k accuracy."""

from __future__ import annotations

from torch import Tensor


def in_top(logits: Tensor, classes: Tensor, k: int) -> Tensor:
    """Return for each example whether its class is among the k largest logits (B, C): bool (B,).

    Raises:
        ValueError: if there are fewer than k classes, or k is below 1.
    """
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(f"k must lie between 1 and the {logits.shape[-1]} classes, got {k}")
    return (logits.topk(k, dim=-1).indices == classes[:, None]).any(-1)
