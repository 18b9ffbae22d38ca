"""BLEU of a whole split from sums over batches, by sacrebleu (Post 2018, arXiv 1804.08771)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.files.optional_imports import needing


def count_bleu(predicted: Sequence[str], references: Sequence[str]) -> dict[str, Tensor]:
    """Return the sums over a batch of sentences: matched and predicted n-grams (4,) each, and the words of both sides.

    Raises:
        ValueError: if there are no sentences, or not as many predictions as references.
    """
    if not predicted or len(predicted) != len(references):
        raise ValueError(f"{len(predicted)} sentences were written for {len(references)} references")
    score = bleu()().corpus_score(list(predicted), [list(references)])
    return {
        "matched": torch.tensor(score.counts),
        "written": torch.tensor(score.totals),
        "words": torch.tensor([score.sys_len, score.ref_len]),
    }


def finish_bleu(sums: dict[str, Tensor]) -> float:
    """Return BLEU in [0, 1] from sums over a split, at sacrebleu's defaults: 13a tokens, exponential smoothing."""
    counts = (sums["matched"].tolist(), sums["written"].tolist(), *sums["words"].tolist())
    return float(bleu().compute_bleu(*counts, smooth_method="exp").score) / 100


def bleu() -> Any:
    """Return sacrebleu's BLEU class; raise ImportError naming the extra if it is not installed."""
    with needing("BLEU", "study"):
        from sacrebleu.metrics import BLEU
    return BLEU
