"""Which queries of a pass are read: all real ones, or a random sample of them in each sequence."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.statistics.reading import Reading
from headwise.statistics.tally import Tally


@dataclass(frozen=True, eq=False)
class Queries:
    """Names the queries that are read and how many they stand for.

    `positions` (1,T) when all are read, else (B,R), sorted. `valid` (B,1|H,R) is 1 for a real query with a key.
    `population` (B,) counts the real queries of each sample and `drawn` (B,) those read. `counts` (B|1,1|H,R) are the
    allowed keys.
    """

    positions: Tensor
    valid: Tensor
    counts: Tensor
    population: Tensor
    drawn: Tensor
    every_count: Tensor
    every_valid: Tensor
    sampled: bool

    @classmethod
    def of(cls, reading: Reading, rows: int | None = None, generator: torch.Generator | None = None) -> "Queries":
        """Takes all real queries, or draws `rows` of them per sample without replacement."""
        counts = reading.allowed_counts()
        counts = counts.expand(-1, -1, reading.queries)
        valid = (counts > 0).expand(reading.batch, -1, -1)
        if reading.real_queries is not None:
            valid = valid & reading.real_queries[:, None]
        real = valid.any(1)
        population = real.sum(-1).float()
        every = valid.to(torch.float32)
        if rows is None or rows >= reading.queries:
            positions = torch.arange(reading.queries, device=real.device)[None]
            return cls(positions, every, counts, population, population, counts, every, False)
        order = torch.rand(real.shape, generator=generator).to(real.device, non_blocking=True).masked_fill(~real, 2.0)
        positions = order.topk(rows, largest=False).indices.sort(-1).values
        index = positions[:, None]
        drawn_counts = counts.expand(reading.batch, -1, -1)
        drawn_counts = drawn_counts.gather(2, index.expand(-1, counts.shape[1], -1))
        drawn_valid = every.gather(2, index.expand(-1, every.shape[1], -1))
        drawn = real.gather(1, positions).sum(-1).float()
        return cls(positions, drawn_valid, drawn_counts, population, drawn, counts, every, True)

    def mean(self, values: Tensor, least_keys: float = 1, extra: int = 0, among: Tensor | None = None) -> Tally:
        """Averages `values` (B,H,R) over real queries with at least `least_keys` allowed keys (and `extra` columns).

        `among` (T,) is 1 for the queries that count, where not all do.

        A sample of queries is weighted to the number it stands for, so that the mean is unbiased; its variance is that
        of sampling without replacement, sample by sample of the batch.
        """
        counted = self.valid * (self.counts + extra >= least_keys)
        if among is not None:
            counted = counted * among[self.positions][:, None]
        # A query without a key may hold NaN or infinity: it must not reach the sum.
        values = torch.where(counted > 0, values, 0).float()
        if not self.sampled:
            weight = counted.sum((0, 2)).expand(values.shape[1])
            return Tally(values.sum((0, 2)), weight.clone(), None, False)
        every = self.every_valid * (self.every_count + extra >= least_keys)
        every = every if among is None else every * among
        weight = every.sum((0, 2)).expand(values.shape[1]).clone()
        share = self.population / self.drawn.clamp_min(1)
        total = (values.sum(-1) * share[:, None]).sum(0)
        drawn = self.drawn[:, None]
        middle = values.sum(-1) / drawn.clamp_min(1)
        residual = (values - middle[..., None]).square().mul(self.valid).sum(-1) / (drawn - 1).clamp_min(1)
        left_out = (1 - drawn / self.population[:, None].clamp_min(1)).clamp_min(0)
        spread = (self.population[:, None].square() * left_out * residual / drawn.clamp_min(1)).sum(0)
        return Tally(total, weight, spread, True)

    def extremum(self, values: Tensor, kind: str, least_keys: float = 1, extra: int = 0) -> Tally:
        """Takes the largest ("max") or smallest ("min") of `values` (B,H,R) over real queries."""
        counted = (self.valid * (self.counts + extra >= least_keys)) > 0
        if kind == "max":
            return Tally.extremum(torch.where(counted, values, -torch.inf).amax((0, 2)).float(), kind, self.sampled)
        return Tally.extremum(torch.where(counted, values, torch.inf).amin((0, 2)).float(), kind, self.sampled)
