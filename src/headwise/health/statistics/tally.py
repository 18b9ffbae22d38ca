"""Tally: the partial sums of a figure, combined over the micro-batches of a step and over ranks."""

from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

# Two-sided 95 % of the normal distribution.
CONFIDENCE = 1.959964


@dataclass(frozen=True, eq=False)
class Tally:
    """A sum and its weight ("mean"), or an extremum ("max", "min"), for each head or for the layer.

    `spread` is the standard deviation of the sum due to sampling of queries, or None if all were read.
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
        """Return the tally of a mean of `value` (B, ...) over samples; samples with NaN are left out."""
        return cls(value.nansum(0), (value == value).sum(0, dtype=value.dtype), None, sampled)

    def tensors(self) -> list[Tensor]:
        """Return the tally's tensors, for a copy to another device."""
        return [self.total, self.weight] if self.spread is None else [self.total, self.weight, self.spread]

    def with_tensors(self, tensors: list[Tensor]) -> "Tally":
        """Return the tally with its tensors replaced, in the order of `tensors()`."""
        total, weight, *spread = tensors
        return replace(self, total=total, weight=weight, spread=spread[0] if spread else None)

    def add(self, other: "Tally") -> "Tally":
        """Return the combination with the same figure of another forward or rank."""
        if self.kind == "max":
            return replace(self, total=torch.maximum(self.total, other.total), sampled=self.sampled or other.sampled)
        if self.kind == "min":
            return replace(self, total=torch.minimum(self.total, other.total), sampled=self.sampled or other.sampled)
        spreads = [s for s in (self.spread, other.spread) if s is not None]
        return replace(
            self,
            total=self.total + other.total,
            weight=self.weight + other.weight,
            spread=reduce(torch.hypot, spreads) if spreads else None,
            sampled=self.sampled or other.sampled,
        )

    def counted(self) -> Tensor:
        """Return which entries have counted a value. NaN in such an entry comes from numbers that are not finite."""
        return self.weight > 0 if self.kind == "mean" else self.total != self._nothing

    @property
    def _nothing(self) -> float:
        return -torch.inf if self.kind == "max" else torch.inf

    def value(self) -> Tensor:
        """Return the mean or the extremum, NaN for entries that have counted no value."""
        if self.kind == "mean":
            return self.total / self.weight
        return torch.where(self.counted(), self.total, torch.nan)

    def margin(self) -> Tensor | None:
        """Return the half width of the 95 % interval of a sampled mean, or None if nothing was sampled."""
        if self.spread is None or self.kind != "mean":
            return None
        return CONFIDENCE * self.spread / self.weight
