"""Helpers for connectionist temporal classification (CTC): the frames that labels need, and greedy decoding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

BLANK = 0


def frames_needed(labels: Sequence[int]) -> int:
    """Return the number of frames that CTC needs for labels: one per label, and a blank between equal neighbours."""
    return len(labels) + sum(one == other for one, other in pairwise(labels))


def best_path(scores: Tensor, frames: Tensor) -> list[list[int]]:
    """Return the labels of each example along its best path.

    Scores are (B, T, labels), of which the first `frames` (B,) frames are real.
    """
    labels = []
    for path, count in zip(scores.argmax(-1).tolist(), frames.tolist(), strict=True):
        previous_labels = [BLANK, *path[: count - 1]]
        labels.append(
            [
                label
                for label, previous in zip(path[:count], previous_labels, strict=True)
                if label not in (BLANK, previous)
            ]
        )
    return labels
