"""Byte-pair encoding trained on a corpus, with a digest of the vocabulary that a model can store."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.files.optional_imports import needing
from headwise.study import StudyError

if TYPE_CHECKING:
    from tokenizers import ByteLevelBPETokenizer

PAD, BEGIN, END = 0, 1, 2
SPECIAL = ("[PAD]", "[BEGIN]", "[END]")
# the special tokens and every byte
LEAST = len(SPECIAL) + 256


class BytePairs:
    """A byte-pair encoding of `size` tokens, trained on `lines` (Sennrich et al. 2016, arXiv 1508.07909).

    Raises StudyError for a size too small for all bytes, and for a text too small for this number of tokens.
    """

    def __init__(self, lines: Sequence[str], size: int) -> None:
        if size < LEAST:
            raise StudyError(
                f"vocabulary={size} holds fewer than the {LEAST} bytes and marks. Choose at least {LEAST}."
            )
        self.coder = _trained(lines, size)
        if (available := self.coder.get_vocab_size()) != size:
            raise StudyError(
                f"vocabulary={size}, and the training text has only {available} byte pairs that recur. Choose "
                f"{available} or fewer."
            )

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each sentence, followed by END."""
        return [[*code.ids, END] for code in self.coder.encode_batch(list(lines))]

    def decode(self, tokens: Tensor) -> list[str]:
        """Return the sentences of tokens (B, T), each up to its END."""
        return [self.coder.decode(row[: row.index(END)] if END in row else row) for row in tokens.tolist()]

    @cached_property
    def digest(self) -> Tensor:
        """Return four numbers that identify this vocabulary, to be stored with the weights learned on it."""
        digest = hashlib.sha256(self.coder.to_str().encode()).digest()
        return torch.tensor([int.from_bytes(digest[at : at + 7], "big") for at in range(0, 28, 7)])


def _trained(lines: Sequence[str], size: int) -> ByteLevelBPETokenizer:
    with needing("Translation", "study"):
        from tokenizers import ByteLevelBPETokenizer
    coder = ByteLevelBPETokenizer()
    coder.train_from_iterator(lines, vocab_size=size, special_tokens=list(SPECIAL), show_progress=False)
    return coder
