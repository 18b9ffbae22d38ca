"""Readings: the queries, keys, values and masks of one pass of a site, from which statistics are computed."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.health.statistics.tally import Tally
from headwise.numerics.masked import visible
from headwise.numerics.precision import magnitude, norms


class SiteFacts(NamedTuple):
    """The properties of a site and a reading that decide which statistics apply."""

    heads: int
    self_attention: bool = True
    causal: bool = False
    bias: bool = False
    softcap: bool = False
    sinks: bool = False
    windowed: bool = False
    hidden: bool = False
    stream: bool = False
    final: bool = False
    stream_obstacle: str | None = None
    output: bool = False
    previous: bool = False
    product_norm: bool = False
    product_obstacle: str | None = None
    text: bool = False
    gate: bool = False
    attention_write: bool = False
    mlp_write: bool = False
    write_obstacles: Mapping[str, str] = {}


class LogitBlock(NamedTuple):
    """The inputs of a block of logits (b,H,r,w): q (b,H,r,d), k (b,H|Hkv,w,d), its part of the mask, the allowed keys.

    `samples` and `positions` (b|1, r) are the block's samples and the positions of its queries.
    """

    q: Tensor
    k: Tensor
    mask: Tensor | None
    allowed: Tensor | None
    samples: slice
    positions: Tensor


TENSORS = (
    "q", "k", "v", "mask", "sinks", "hidden", "stream", "final", "output", "gate", "attention_write", "mlp_write",
    "real_queries", "product_norm",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Reading:
    """One pass of a site: q (B,H,T,d), k (B,H|Hkv,N,d), v (B,H|Hkv,N,dv) and which keys each query may see.

    Attributes:
        mask: broadcasts to (B,H,T,N): bool (True = allowed) or float (added to the logits). With a float mask a key is
            allowed if the mask is above `MASKED`, whatever its weight: a key with a bias of -100 is still allowed.
        causal: whether query i sees only the keys up to i.
        scale: factor of the logits; 1/√d by default.
        softcap: c of c·tanh(s/c), applied to the logits before the mask.
        sinks: (H,) logits of an additional column.
        hidden: (B,T,C) the input of attention, after a norm before it if the model has one.
        stream: (B,T,C) the residual stream that enters the block.
        final: (B,T,C) the residual stream after the last block.
        stream_obstacle: the reason why `stream` or `final` is missing.
        output: (B,H,T,dv) the output per head before the output projection.
        gate: (B,H,T,1|dv) the gates of that output, from 0 to 1.
        attention_write, mlp_write: (B,T,C) what attention and the MLP of the block add to the residual stream.
        write_obstacles: the reasons why these are missing, by name.
        real_queries: (B,T) False on padding.
        self_attention: whether queries and keys are the same tokens.
        windowed: whether each batch entry is a window of a sample.
        product_norm: (H,) the largest singular value of W_QᵀW_K.
        product_obstacle: the reason why the logits are not determined by W_QᵀW_K.
        edit: a function of a block (b,H,r,w) of masked logits, -inf for forbidden keys, and its `LogitBlock`, which
            returns the logits that enter the softmax.
        known_bound: an upper bound of the logits, given where computing it would wait for the device.
        text: the slice of text tokens among those of an image.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    causal: bool = False
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    hidden: Tensor | None = None
    stream: Tensor | None = None
    final: Tensor | None = None
    stream_obstacle: str | None = None
    output: Tensor | None = None
    gate: Tensor | None = None
    attention_write: Tensor | None = None
    mlp_write: Tensor | None = None
    write_obstacles: Mapping[str, str] = field(default_factory=dict)
    real_queries: Tensor | None = None
    self_attention: bool = True
    windowed: bool = False
    product_norm: Tensor | None = None
    product_obstacle: str | None = None
    edit: Callable[[Tensor, LogitBlock], Tensor] | None = None
    known_bound: float | None = None
    text: slice | None = None
    # What kernels have read of it and are asked for again: by "lse" the log-sum-exp of every row, and by the id of a
    # tensor of tokens its figures. A reading with other tensors has none of them.
    kept: dict[str | int, Tensor] = field(default_factory=dict, repr=False, init=False)
    # What follows from the mask and the real queries alone, once it is known.
    counts: "Counts" = field(default_factory=lambda: Counts(), repr=False, init=False)

    def __post_init__(self) -> None:
        for name in TENSORS:
            tensor = getattr(self, name)
            object.__setattr__(self, name, None if tensor is None else tensor.detach())
        if self.q.dim() != 4 or self.k.dim() != 4 or self.v.dim() != 4:
            shapes = [tuple(t.shape) for t in (self.q, self.k, self.v)]
            raise ValueError(f"a reading needs q (B,H,T,d), k and v (B,H,N,d), got {shapes}")
        if self.heads % self.k.shape[1]:
            raise ValueError(f"{self.heads} query heads cannot share {self.k.shape[1]} key heads")
        if self.scale is None:
            object.__setattr__(self, "scale", 1 / math.sqrt(self.q.shape[-1]))
        if self.mask is not None and self.mask.dim() < 4:
            object.__setattr__(self, "mask", self.mask[(None,) * (4 - self.mask.dim())])

    @staticmethod
    def given(tensor: Tensor | None) -> Tensor:
        """Return an optional tensor of a reading that a statistic requires in `applies`.

        Raises:
            ValueError: if it is None.
        """
        if tensor is None:
            raise ValueError("this reading does not hold the tensor: check facts() before reading it")
        return tensor

    @property
    def factor(self) -> float:
        """Return the factor of the logits: `scale`, by default 1/√d."""
        assert self.scale is not None
        return self.scale

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def queries(self) -> int:
        return self.q.shape[2]

    @property
    def keys(self) -> int:
        return self.k.shape[2]

    @property
    def keeps_rows_alike(self) -> bool:
        """Return whether all queries of a sample see the same keys without bias, so that they share sums over keys."""
        mask = self.mask
        same = mask is None or (mask.dtype == torch.bool and mask.shape[-2] == 1 and mask.shape[1] == 1)
        return same and not self.causal and self.softcap is None and self.edit is None

    @cached_property
    def query_norms(self) -> Tensor:
        """Return ‖q_i‖ (B,H,T) in fp32, or fp64 for a model in fp64; cached, because several figures read it."""
        return norms(self.q)

    @cached_property
    def key_norms(self) -> Tensor:
        """Return ‖k_j‖ (B,Hkv,N), in the precision of `query_norms`."""
        return norms(self.k)

    def logit_bound(self) -> Tensor:
        """Return |scale|·max‖q_i‖·max‖k_j‖ (0-d), which no logit exceeds."""
        return self.query_norms.max() * self.key_norms.max() * abs(self.factor)

    def real_of(self, tokens: Tensor) -> Tensor:
        """Return 1 for real tokens and 0 for padding, (B,T), on the device of `tokens` (B,T,C)."""
        real = self.real_queries
        return tokens.new_ones(tokens.shape[:2], dtype=torch.float32) if real is None else real.float()

    def without_padding(self, tokens: Tensor) -> Tensor:
        """Return tokens (B,T,C) in fp32 with padding, which may hold any value, set to 0."""
        tokens = tokens.float()
        return tokens if self.real_queries is None else tokens.masked_fill(~self.real_queries[..., None], 0)

    def facts(self, previous: bool = False) -> SiteFacts:
        """Return the facts of this reading; `previous` says whether the layer before was read too."""
        return SiteFacts(
            heads=self.heads,
            self_attention=self.self_attention and self.queries == self.keys,
            causal=self.causal,
            bias=self.mask is not None and self.mask.dtype != torch.bool,
            softcap=self.softcap is not None,
            sinks=self.sinks is not None,
            windowed=self.windowed,
            hidden=self.hidden is not None,
            stream=self.stream is not None,
            final=self.final is not None,
            stream_obstacle=self.stream_obstacle,
            output=self.output is not None,
            previous=previous,
            product_norm=self.product_norm is not None,
            product_obstacle=self.product_obstacle or (None if self.edit is None else "a method edits the logits"),
            text=self.text is not None,
            gate=self.gate is not None,
            attention_write=self.attention_write is not None and self.stream is not None,
            mlp_write=self.mlp_write is not None and self.stream is not None,
            write_obstacles=self.write_obstacles,
        )

    def allowed(self, samples: slice, positions: Tensor, rows: slice | None = None) -> Tensor | None:
        """Return which keys the queries at `positions` (b|1, R) of `samples` may see, (b|1,H|1,R|1,N), or None for all.

        `rows` is the same positions as a slice if they are consecutive, which avoids a gather.
        """
        mask = self.mask_at(samples, positions, rows)
        allowed = None if mask is None else visible(mask)
        if not self.causal:
            return allowed
        seen = torch.arange(self.keys, device=self.q.device) <= positions[:, None, :, None]
        return seen if allowed is None else allowed & seen

    def mask_at(self, samples: slice, positions: Tensor, rows: slice | None = None) -> Tensor | None:
        """Return the mask of `samples` and of the rows at `positions` (b|1, R), without expanding it."""
        mask = self.mask
        if mask is None:
            return None
        if mask.shape[0] > 1:
            mask = mask[samples]
        if mask.shape[-2] == 1 or rows is not None:
            return mask if mask.shape[-2] == 1 else mask[:, :, rows]
        mask = mask.expand(positions.shape[0], -1, -1, -1)
        shape = (*mask.shape[:2], positions.shape[1], mask.shape[-1])
        return mask.gather(2, positions[:, None, :, None].expand(shape))

    def with_tokens(self, **fields: Any) -> "Reading":
        """Return the reading with other tokens of the residual stream, whose queries and keys count as before."""
        changed = replace(self, **fields)
        object.__setattr__(changed, "counts", self.counts)
        return changed

    def share_counts(self, before: "Reading") -> None:
        """Count queries and keys together with a reading of as many, if neither has a mask or padding."""
        tensors = (self.mask, self.real_queries, before.mask, before.real_queries)
        if self.causal == before.causal and all(x is None for x in tensors):
            object.__setattr__(self, "counts", before.counts)

    @property
    def keys_unseen(self) -> tuple[Tensor, Tensor]:
        """Return which keys are not among `seen_keys()`, (B,1|H,N) bool, and the number of those that are, (1|H,)."""
        if self.counts.keys is None:
            seen = self.seen_keys().expand(self.batch, -1, -1)
            self.counts.keys = ~seen, seen.sum((0, 2)).float()
        return self.counts.keys

    def seen_keys(self, block: int = 1 << 22) -> Tensor:
        """Return which keys at least one real query may see, (B|1, H|1, N) bool, reading the mask in blocks of rows."""
        device, mask = self.q.device, self.mask
        real = self.real_queries
        real = torch.ones(1, self.queries, dtype=torch.bool, device=device) if real is None else real
        # Under causality key j is seen by the queries from j on.
        later = real.flip(-1).cumsum(-1).flip(-1) > 0 if self.causal else real.any(-1, keepdim=True)
        if self.causal:
            later = torch.nn.functional.pad(later, (0, max(0, self.keys - self.queries)))[:, : self.keys]
        if mask is None or mask.shape[-2] == 1:
            seen = later[:, None].expand(-1, -1, self.keys)
            return seen if mask is None else seen & visible(mask)[:, :, 0]
        every = torch.arange(self.queries, device=device)[None]
        size = max(1, block // (mask.shape[0] * mask.shape[1] * self.keys))
        seen = torch.zeros(1, 1, self.keys, dtype=torch.bool, device=device)
        for rows in (slice(i, i + size) for i in range(0, self.queries, size)):
            allowed = self.allowed(slice(None), every[:, rows], rows)
            assert allowed is not None
            seen = seen | (allowed & real[:, None, rows, None]).any(-2)
        return seen

    def allowed_counts(self, block: int = 1 << 22) -> Tensor:
        """Return how many keys each query may see, (B|1, H|1, T|1) float, reading the mask in blocks of rows."""
        device = self.q.device
        every = torch.arange(self.queries, device=device)[None]
        if self.mask is None:
            counts = (every + 1).clamp(max=self.keys) if self.causal else torch.full((1, 1), self.keys, device=device)
            return counts.float()[:, None]
        if self.mask.shape[-2] == 1:
            allowed = visible(self.mask)
            if not self.causal:
                return allowed.sum(-1).float()
            return allowed.long().cumsum(-1)[:, :, 0, every[0].clamp(max=self.keys - 1)].float()
        per_row = self.mask.shape[0] * self.mask.shape[1] * self.keys
        size = max(1, block // per_row)
        blocks = [slice(i, i + size) for i in range(0, self.queries, size)]
        parts = [self.allowed(slice(None), every[:, rows], rows) for rows in blocks]
        return torch.cat([allowed.sum(-1) for allowed in parts if allowed is not None], -1).float()


@dataclass(frozen=True, eq=False)
class Queries:
    """The queries that are read, all or a random sample of them.

    Attributes:
        positions: (1,T) if all are read, else (B,R), sorted.
        valid: (B,1|H,R) 1 for a real query with an allowed key, else 0.
        counts: (B|1,1|H,R) number of allowed keys.
        population: (B,) number of real queries of each sample.
        drawn: (B,) number of those that are read.
        every_count, every_valid: `counts` and `valid` of all queries.
        sampled: whether the queries are a random sample.
    """

    positions: Tensor
    valid: Tensor
    counts: Tensor
    population: Tensor
    drawn: Tensor
    every_count: Tensor
    every_valid: Tensor
    sampled: bool
    # Several figures count the same queries.
    _known: dict[float, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, reading: Reading, rows: int | None = None, generator: torch.Generator | None = None) -> "Queries":
        """Return all queries of a reading, or `rows` real ones per sample drawn without replacement."""
        whole = rows is None or rows >= reading.queries
        if whole and reading.counts.queries is not None:
            return reading.counts.queries
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
            reading.counts.queries = cls(positions, every, counts, population, population, counts, every, False)
            return reading.counts.queries
        order = torch.rand(real.shape, generator=generator).to(real.device, non_blocking=True).masked_fill(~real, 2.0)
        positions = order.topk(rows, largest=False).indices.sort(-1).values
        index = positions[:, None]
        drawn_counts = counts.expand(reading.batch, -1, -1)
        drawn_counts = drawn_counts.gather(2, index.expand(-1, counts.shape[1], -1))
        drawn_valid = every.gather(2, index.expand(-1, every.shape[1], -1))
        drawn = real.gather(1, positions).sum(-1).float()
        return cls(positions, drawn_valid, drawn_counts, population, drawn, counts, every, True)

    def mean(self, values: Tensor, least_keys: float = 1, extra: int = 0, among: Tensor | None = None) -> Tally:
        """Return the mean of `values` (B,H,R) over real queries with at least `least_keys` columns.

        Columns are the allowed keys and `extra` others. `among` (B|1,T) is 0 for queries that do not count.

        Sampled queries are weighted by the number of queries that they represent, so that the mean is unbiased; its
        variance is that of sampling without replacement within each sample of the batch.
        """
        left_out, weight = self._left_out(least_keys - extra)
        if among is not None:
            others = among == 0
            here = others.expand(len(values), -1).gather(1, self.positions.expand(len(values), -1))
            left_out = left_out | here[:, None]
        # Queries without allowed keys may hold NaN or infinity.
        values = values.masked_fill(left_out, 0).float()
        if not self.sampled:
            weight = weight if among is None else (~left_out).sum((0, 2)).float()
            return Tally(values.sum((0, 2)), weight.expand(values.shape[1]), None, False)
        every = self.every_valid * (self.every_count + extra >= least_keys)
        every = every if among is None else every.masked_fill(others[:, None], 0)
        weight = every.sum((0, 2)).expand(values.shape[1]).clone()
        share = self.population / self.drawn.clamp_min(1)
        total = (values.sum(-1) * share[:, None]).sum(0)
        drawn = self.drawn[:, None]
        # In a unit in which no square underflows.
        unit = magnitude(values, (0, 2)) if values.numel() else values.new_ones(1, values.shape[1], 1)
        values = values / unit
        middle = values.sum(-1) / drawn.clamp_min(1)
        residual = (values - middle[..., None]).square().mul(self.valid).sum(-1) / (drawn - 1).clamp_min(1)
        left_out = (1 - drawn / self.population[:, None].clamp_min(1)).clamp_min(0)
        spread = (self.population[:, None].square() * left_out * residual / drawn.clamp_min(1)).sum(0)
        return Tally(total, weight, spread.sqrt() * unit[0, :, 0], True)

    def _left_out(self, least: float) -> tuple[Tensor, Tensor]:
        """Return which queries are not valid or see fewer keys, bool (B,1|H,R), and the number of others, (1|H,)."""
        if least not in self._known:
            left_out = (self.valid == 0) | (self.counts < least)
            self._known[least] = left_out, (~left_out).sum((0, 2)).float()
        return self._known[least]

    @cached_property
    def invalid(self) -> Tensor:
        """Return which of all queries are padding or have no allowed key, bool (B,1|H,T)."""
        return self.every_valid == 0

    @cached_property
    def none_read(self) -> Tensor:
        """Return which samples have no query that is read, bool (B,1|H)."""
        return self.valid.sum(-1) == 0

    @cached_property
    def every_weight(self) -> Tensor:
        """Return the number of all valid queries, (1|H,)."""
        return self.every_valid.sum((0, 2))

    def extremum(self, values: Tensor, kind: str, least_keys: float = 1, extra: int = 0) -> Tally:
        """Return the largest ("max") or smallest ("min") of `values` (B,H,R) over the queries that `mean` counts."""
        left_out, _ = self._left_out(least_keys - extra)
        if kind == "max":
            return Tally.extremum(values.masked_fill(left_out, -torch.inf).amax((0, 2)).float(), kind, self.sampled)
        return Tally.extremum(values.masked_fill(left_out, torch.inf).amin((0, 2)).float(), kind, self.sampled)


@dataclass(eq=False)
class Counts:
    """What follows from the mask and the real queries of a reading: all queries, and `keys_unseen`."""

    queries: Queries | None = None
    keys: tuple[Tensor, Tensor] | None = None
