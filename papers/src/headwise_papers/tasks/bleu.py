"""BLEU of a whole split from sums over its batches, by sacrebleu (Post 2018, arXiv 1804.08771)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.files.optional_imports import needing


def count_bleu(said: Sequence[str], meant: Sequence[str]) -> dict[str, Tensor]:
    """Return the sums of a batch of sentences: matched and written n-grams (4,) each, and the words of both sides.

    Raises:
        ValueError: where there are not as many sentences on both sides, or none.
    """
    if not said or len(said) != len(meant):
        raise ValueError(f"{len(said)} sentences were written for {len(meant)} references")
    found = bleu()().corpus_score(list(said), [list(meant)])
    return {
        "matched": torch.tensor(found.counts),
        "written": torch.tensor(found.totals),
        "words": torch.tensor([found.sys_len, found.ref_len]),
    }


def finish_bleu(sums: dict[str, Tensor]) -> float:
    """Return BLEU in [0, 1] from sums over a split, at sacrebleu's defaults: 13a tokens, exponential smoothing."""
    counts = (sums["matched"].tolist(), sums["written"].tolist(), *sums["words"].tolist())
    return float(bleu().compute_bleu(*counts, smooth_method="exp").score) / 100


def bleu() -> Any:
    """Return sacrebleu's class of the metric; raise ImportError naming the extra where it is not installed."""
    with needing("BLEU", "study"):
        from sacrebleu.metrics import BLEU
    return BLEU
