"""A figure that can still be added to: over micro-batches of a step and over ranks, before it becomes one number."""

from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

# Two-sided 95 % of the normal distribution.
CONFIDENCE = 1.959964


@dataclass(frozen=True, eq=False)
class Tally:
    """Holds a sum and its weight ("mean"), or an extremum ("max", "min"), for each head or for the layer.

    `spread` is the variance of the sum that comes from reading a sample of the queries; None where all were read.
    """

    total: Tensor
    weight: Tensor
    spread: Tensor | None = None
    sampled: bool = False
    kind: str = "mean"

    @classmethod
    def extremum(cls, value: Tensor, kind: str, sampled: bool) -> "Tally":
        return cls(value, torch.ones_like(value), None, sampled, kind)

    @classmethod
    def over_samples(cls, value: Tensor, sampled: bool = False) -> "Tally":
        """Averages `value` (B, ...) over samples; a sample with NaN has no such value and is left out."""
        counted = ~value.isnan()
        return cls(value.nan_to_num(0.0).sum(0), counted.sum(0).to(value.dtype), None, sampled)

    def tensors(self) -> list[Tensor]:
        """Return the tensors it is made of, for a copy to another device."""
        return [self.total, self.weight] if self.spread is None else [self.total, self.weight, self.spread]

    def with_tensors(self, tensors: list[Tensor]) -> "Tally":
        """Return the same tally made of others, in the order of `tensors`."""
        total, weight, *spread = tensors
        return replace(self, total=total, weight=weight, spread=spread[0] if spread else None)

    def add(self, other: "Tally") -> "Tally":
        """Joins the same figure of another forward or another rank; a maximum joins as a maximum."""
        if self.kind == "max":
            return replace(self, total=torch.maximum(self.total, other.total), sampled=self.sampled or other.sampled)
        if self.kind == "min":
            return replace(self, total=torch.minimum(self.total, other.total), sampled=self.sampled or other.sampled)
        spreads = [s for s in (self.spread, other.spread) if s is not None]
        return replace(
            self,
            total=self.total + other.total,
            weight=self.weight + other.weight,
            spread=reduce(torch.add, spreads) if spreads else None,
            sampled=self.sampled or other.sampled,
        )

    def counted(self) -> Tensor:
        """Return where anything was counted: a value that is NaN elsewhere is that of a query or weight that is not
        finite."""
        return self.weight > 0 if self.kind == "mean" else self.total != self._nothing

    @property
    def _nothing(self) -> float:
        return -torch.inf if self.kind == "max" else torch.inf

    def value(self) -> Tensor:
        """Return the mean or the extremum; NaN where nothing was counted."""
        if self.kind == "mean":
            return self.total / self.weight
        return torch.where(self.counted(), self.total, torch.nan)

    def margin(self) -> Tensor | None:
        """Return the half width of the 95 % interval of a sampled mean, None where no sample was drawn."""
        if self.spread is None or self.kind != "mean":
            return None
        return CONFIDENCE * self.spread.clamp_min(0).sqrt() / self.weight
