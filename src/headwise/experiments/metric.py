"""Metric: what is measured of a model's outputs, and rows for figures that are no sums."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Metric:
    """Declare a metric: its name in outcomes, its words, its good direction and its unit ("%" for a share in [0, 1]).

    Example:
        >>> from headwise.study import Metric
        >>> Metric("letter_error", higher_is_better=False, unit="%", failure=1.0).label
        'letter error'
    """

    name: str
    label: str = ""
    higher_is_better: bool = True
    unit: str = ""
    # what a diverged run counts as, for example chance; None leaves diverged runs out of this metric
    failure: float | None = None

    def __post_init__(self) -> None:
        if not self.label:
            object.__setattr__(self, "label", self.name.replace("_", " "))


@dataclass(frozen=True)
class Rows:
    """Mark a tensor that `count` gives as one row an example: rows are put together, not added (for a rank correlation).

    Example:
        >>> import torch
        >>> from headwise.study import Rows
        >>> sums = {"pairs": Rows(torch.tensor([[0.5, 1.0], [2.0, 1.5]]))}  # what a task's `count` gives
    """

    tensor: Tensor
