"""What connectionist temporal classification needs beside its loss: frames enough, and the words that letters spell."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

BLANK = 0


def frames_needed(labels: Sequence[int]) -> int:
    """Count the frames that CTC needs for labels: one each, and a blank between two that are alike."""
    return len(labels) + sum(one == other for one, other in pairwise(labels))


def best_path(scores: Tensor, frames: Tensor) -> list[list[int]]:
    """Return the labels of each example along its best path: scores (B, T, labels), the first `frames` (B,) of which
    count."""
    found = []
    for path, count in zip(scores.argmax(-1).tolist(), frames.tolist(), strict=True):
        before = [BLANK, *path[: count - 1]]
        found.append([label for label, last in zip(path[:count], before, strict=True) if label not in (BLANK, last)])
    return found
