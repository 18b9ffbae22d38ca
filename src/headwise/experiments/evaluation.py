"""Evaluation: a named pass over a split, with what it does in its own way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headwise.experiments.batch import Batch
from headwise.experiments.metric import Rows

Sums = dict[str, Tensor | Rows]


@dataclass(frozen=True)
class Evaluation:
    """Name a pass in evaluation mode; whatever is None is done as the task does it.

    `name` stands first in outcomes ("test/fog-3/accuracy"), `split` is asked of `Task.data`. `output(model, inputs)` replaces
    the plain forward: it decodes, slides a window, or averages over scales.

    Example:
        >>> from headwise.study import Evaluation
        >>> Evaluation("test/fog", split="fog", limit=1000).split
        'fog'
    """

    name: str
    split: str = ""
    output: Callable[[nn.Module, Any], Any] | None = None
    batch: Callable[[Any, torch.Generator | None], Batch] | None = None
    count: Callable[[Any, Any], Sums] | None = None
    finish: Callable[[dict[str, Tensor]], dict[str, Any]] | None = None
    # "epoch": after every epoch and at the end; "phase": at the end of every phase; "never" takes a built-in pass away
    when: Literal["end", "phase", "epoch", "never"] = "end"
    # at most this many examples, the first ones
    limit: int | None = None

    def __post_init__(self) -> None:
        if not self.split:
            object.__setattr__(self, "split", self.name)
