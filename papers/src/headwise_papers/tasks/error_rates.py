"""Letter and word error rates: the edits of a whole split divided by the lengths of its references."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def edits(predicted: Sequence[object], reference: Sequence[object]) -> int:
    """Return the Levenshtein distance: the smallest number of insertions, deletions and substitutions."""
    row = list(range(len(reference) + 1))
    for i, one in enumerate(predicted, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(reference, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (one != other))
    return row[-1]


def count_errors(predicted: Sequence[str], references: Sequence[str]) -> dict[str, Tensor]:
    """Return the sums over a batch of sentences: edits and reference lengths, in letters (with spaces) and in words."""
    pairs = list(zip(predicted, references, strict=True))
    sums = {
        "letter_edits": sum(edits(one, other) for one, other in pairs),
        "letters": sum(len(other) for _, other in pairs),
        "word_edits": sum(edits(one.split(), other.split()) for one, other in pairs),
        "words": sum(len(other.split()) for _, other in pairs),
    }
    return {name: torch.tensor(value) for name, value in sums.items()}


def finish_errors(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the error rates of a split, which can exceed 1 if predictions are longer than their references."""
    return {"letter_error": sums["letter_edits"] / sums["letters"], "word_error": sums["word_edits"] / sums["words"]}
