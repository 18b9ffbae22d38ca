"""Letter and word error rates: edits over a whole split divided by what the references hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def edits(said: Sequence[object], meant: Sequence[object]) -> int:
    """Count the least insertions, deletions and substitutions that make one sequence the other (Levenshtein)."""
    row = list(range(len(meant) + 1))
    for i, one in enumerate(said, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(meant, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (one != other))
    return row[-1]


def count_errors(said: Sequence[str], meant: Sequence[str]) -> dict[str, Tensor]:
    """Return the sums of a batch of sentences: edits and lengths of the references, in letters (spaces count) and in
    words."""
    pairs = list(zip(said, meant, strict=True))
    found = {
        "letter_edits": sum(edits(one, other) for one, other in pairs),
        "letters": sum(len(other) for _, other in pairs),
        "word_edits": sum(edits(one.split(), other.split()) for one, other in pairs),
        "words": sum(len(other.split()) for _, other in pairs),
    }
    return {name: torch.tensor(value) for name, value in found.items()}


def finish_errors(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the error rates of a split, which exceed 1 where more is said than was meant."""
    return {
        "letter_error": sums["letter_edits"] / sums["letters"],
        "word_error": sums["word_edits"] / sums["words"],
    }
