"""Batch: what a model takes and what its output is judged against."""

from __future__ import annotations

from typing import Any, NamedTuple


class Batch(NamedTuple):
    """Hold the inputs and targets of one batch.

    A model gets a tensor as its one argument, a tuple as its arguments in order, a dict as its keywords; a tuple that
    holds one dict hands over the dict itself.

    Example:
        >>> import torch
        >>> from headwise.study import Batch
        >>> batch = Batch({"input_ids": torch.zeros(4, 8), "attention_mask": torch.ones(4, 8)}, torch.zeros(4))
        >>> sorted(batch.inputs)
        ['attention_mask', 'input_ids']
    """

    inputs: Any
    targets: Any = None
