"""Figures of one reading, stored as plain numbers and converted to records on request."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from headwise.attend import Site
from headwise.health.health_records import Record
from headwise.health.statistics import STATISTICS, Tally
from headwise.health.statistics.weights import WEIGHT_STATISTICS


def on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors on the CPU, in their dtypes and shapes, with one copy from each device."""
    moved = list(tensors)
    for device in {tensor.device for tensor in moved if tensor.device.type != "cpu"}:
        indices = [index for index, tensor in enumerate(tensors) if tensor.device == device]
        # Those of a dtype together, so that they are converted by one operation.
        indices.sort(key=lambda index: str(tensors[index].dtype))
        # fp64 represents fp32, flags and counts exactly; MPS has no fp64, and so no figure in fp64 either.
        wide = torch.float32 if device.type == "mps" else torch.float64
        of_dtypes = [list(group) for _, group in groupby(indices, key=lambda index: tensors[index].dtype)]
        flat = [torch.cat([tensors[i].detach().flatten() for i in group]).to(wide) for group in of_dtypes]
        joined = torch.cat(flat).cpu()
        parts = joined.split([moved[index].numel() for index in indices])
        for index, part in zip(indices, parts, strict=True):
            moved[index] = part.view(moved[index].shape).to(moved[index].dtype)
    return moved


@dataclass(frozen=True)
class Figures:
    """Values of one statistic of one site at one step: one per head, one per group of heads, or one for the layer.

    `missing` has the heads without a value, such as a head with a single key for every query.
    """

    site: str
    depth: int
    step: int
    statistic: str
    per: str
    values: array[float]
    margins: array[float] | None
    sampled: bool
    missing: frozenset[int] = frozenset()

    @property
    def worse(self) -> str | None:
        """Return the unhealthy side of the statistic, "high" or "low", or None."""
        return (STATISTICS.get(self.statistic) or WEIGHT_STATISTICS[self.statistic.rpartition("_")[0]]).worse

    @classmethod
    def of(cls, site: Site, step: int, name: str, tally: Tally) -> Figures | None:
        """Return the figures of a tally that is joined over ranks; None if nothing was counted."""
        statistic = STATISTICS[name]()
        counted = tally.counted()
        if not bool(counted.any()):
            return None
        # A statistic of pairs of heads ends up as one number per head of this layer.
        heads = counted.reshape(counted.shape[0], -1).any(-1).tolist()
        margin = tally.margin()
        if statistic.per == "layer" and margin is not None and margin.numel() > 1:
            # All heads read the same sampled queries, so that in the worst case their errors add up.
            margin = margin.mean(0, keepdim=True)
        values = array("d", statistic.finish(tally).double().flatten().tolist())
        margins = None if margin is None else array("d", margin.double().flatten().tolist())
        missing = frozenset(head for head, known in enumerate(heads) if not known)
        return cls(site.name, site.depth, step, name, statistic.per, values, margins, tally.sampled, missing)

    @classmethod
    def largest(cls, site: str, depth: int, step: int, name: str, values: Sequence[float]) -> list[Figures]:
        """Return the largest of values as a figure, NaN where there is one; an empty list without values."""
        if not values:
            return []
        largest = next((value for value in values if math.isnan(value)), max(values))
        return [cls(site, depth, step, name, "layer", array("d", [largest]), None, False)]

    @classmethod
    def of_weights(cls, site: Site, step: int, name: str, values: Tensor, heads: int) -> Figures:
        """Return the figures of a weight statistic: one per head, or per group of heads that share keys and values."""
        numbers = array("d", values.double().flatten().tolist())
        return cls(
            site.name, site.depth, step, name, "head" if len(numbers) == heads else "group", numbers, None, False
        )

    def records(self) -> Iterator[Record]:
        """Return a record for each value, NaN and infinity included; heads in `missing` have none."""
        for head, value in enumerate(self.values):
            if head in self.missing:
                continue
            record: Record = {
                "site": self.site,
                "depth": self.depth,
                "head": head if self.per == "head" else None,
                "step": self.step,
                "statistic": self.statistic,
                "value": value,
            }
            if self.per == "group":
                record["group"] = head
            if self.sampled:
                record["sampled"] = True
            if self.margins is not None and math.isfinite(self.margins[head]):
                record["low"], record["high"] = value - self.margins[head], value + self.margins[head]
            yield record
