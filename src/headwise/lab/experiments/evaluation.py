"""Batches, metrics, and the evaluations that compute metrics from a split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn


class Batch(NamedTuple):
    """The inputs and targets of one batch.

    The model receives a tensor as its only argument, a tuple as positional arguments, and a dict as keywords; wrap a
    dict in a tuple to pass the dict itself.

    Example:
        >>> import torch
        >>> from headwise.study import Batch
        >>> batch = Batch({"input_ids": torch.zeros(4, 8), "attention_mask": torch.ones(4, 8)}, torch.zeros(4))
        >>> sorted(batch.inputs)
        ['attention_mask', 'input_ids']
    """

    inputs: Any
    targets: Any = None


@dataclass(frozen=True)
class Metric:
    """A metric: its name in outcomes, its label, its better direction and its unit ("%" for a share in [0, 1]).

    Example:
        >>> from headwise.study import Metric
        >>> Metric("letter_error", higher_is_better=False, unit="%", failure=1.0).label
        'letter error'
    """

    name: str
    label: str = ""
    higher_is_better: bool = True
    unit: str = ""
    # the value that a diverged run counts as, for example chance; None leaves diverged runs out of this metric
    failure: float | None = None

    def __post_init__(self) -> None:
        if not self.label:
            object.__setattr__(self, "label", self.name.replace("_", " "))


@dataclass(frozen=True)
class Rows:
    """A tensor returned by `count` with one row per example: rows are concatenated, not added (for a rank correlation).

    Example:
        >>> import torch
        >>> from headwise.study import Rows
        >>> sums = {"pairs": Rows(torch.tensor([[0.5, 1.0], [2.0, 1.5]]))}  # what a task's `count` gives
    """

    tensor: Tensor


Sums = dict[str, Tensor | Rows]


@dataclass(frozen=True)
class Evaluation:
    """A pass over a split in evaluation mode; for each function that is None, the task's own is used.

    `name` is the first part of outcomes ("test/fog-3/accuracy"), `split` is the argument of `Task.data`.
    `output(model, inputs)` replaces the plain forward: it decodes, slides a window, or averages over scales.

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
    # "epoch": after every epoch and at the end; "phase": at the end of every phase; "never" removes a built-in
    # evaluation
    when: Literal["end", "phase", "epoch", "never"] = "end"
    # at most this many examples, the first ones
    limit: int | None = None

    def __post_init__(self) -> None:
        if not self.split:
            object.__setattr__(self, "split", self.name)
