"""Logits and softmax of blocks of queries, computed in reused memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import softplus

from headwise.health.statistics.reading import LogitBlock, Queries, Reading
from headwise.numerics.masked import masked_logits
from headwise.numerics.precision import entropy_of

# Elements of one block of logits. Long sequences are read in blocks that fit the cache of a core; short samples are
# joined to larger blocks, because there the number of operators matters more.
BLOCK = 1 << 19
JOINED = 1 << 21
# The fewest rows of a block, because with fewer the keys are read from memory too often, and the largest number of
# elements that a block may have for it.
FEWEST_ROWS = 32
LARGEST_BLOCK = 1 << 23
# Blocks are this many times larger on other devices, whose kernels need more elements; memory stays below a GiB.
ON_A_DEVICE = 32
# Logits of forbidden keys: finite, so that 0 · logit is 0, and far below any float mask.
FAR = -1.0e30
# The rounding error of fp32 logits is about 1e-7 of their size; above this size it may affect the fourth digit of a
# small entropy.
SAFE_LOGIT = 512.0


def precise_dtype(reading: Reading) -> torch.dtype:
    """Return float64 if logits may be so large that fp32 rounding hides the differences between them, else float32."""
    if reading.q.device.type == "mps" or reading.q.numel() == 0 or reading.k.numel() == 0:
        return torch.float32
    bound = float(reading.logit_bound()) if reading.known_bound is None else reading.known_bound
    return torch.float64 if bound > SAFE_LOGIT else torch.float32


class Logits:
    """The scaled, capped and masked logits of a reading, computed by blocks of queries."""

    def __init__(self, reading: Reading, queries: Queries, dtype: torch.dtype) -> None:
        self.reading, self.queries, self.dtype = reading, queries, dtype
        self.q = reading.q
        if reading.real_queries is not None:
            # Padded queries may hold NaN, which zero weights would not hide.
            self.q = self.q.masked_fill(~reading.real_queries[:, None, :, None], 0)
        if queries.sampled:
            index = queries.positions[:, None, :, None]
            self.q = self.q.gather(2, index.expand(-1, reading.heads, -1, reading.q.shape[-1]))
        self.k = reading.k.to(dtype).contiguous()

    def width(self, rows: slice) -> int:
        """Return how many keys a block can see; under causality later keys are hidden from all its rows."""
        reading = self.reading
        return min(reading.keys, rows.stop) if reading.causal and not self.queries.sampled else reading.keys

    def block(self, samples: slice, rows: slice, scratch: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logits (b,H,r,w) of a block in the memory `scratch`, and 1 for allowed keys or None for all.

        Forbidden keys have the logit FAR.
        """
        reading, width = self.reading, self.width(rows)
        q = self.q[samples, :, rows].to(self.dtype)
        k = self.k[samples, :, :width]
        b, heads, r, d = q.shape
        groups = k.shape[1]
        out = scratch[: b * heads * r * width].view(b * groups, heads // groups * r, width)
        keys = k.reshape(b * groups, width, d).transpose(1, 2)
        out.baddbmm_(q.reshape(b * groups, -1, d), keys, beta=0, alpha=reading.factor)
        logits, seen = self._masked(out.view(b, heads, r, width), samples, rows)
        if reading.edit is not None:
            forbidden = logits.masked_fill(logits <= FAR / 2, -torch.inf)
            edited = reading.edit(forbidden, self._logit_block(q, k, samples, rows, seen))
            logits.copy_(edited.masked_fill(edited == -torch.inf, FAR))
        return logits, seen

    def _logit_block(self, q: Tensor, k: Tensor, samples: slice, rows: slice, seen: Tensor | None) -> LogitBlock:
        sampled = self.queries.sampled
        positions = self.queries.positions[samples, rows] if sampled else self.queries.positions[:, rows]
        mask = self.reading.mask_at(samples, positions, None if sampled else rows)
        mask = None if mask is None else mask[..., : k.shape[2]]
        return LogitBlock(q, k, mask, None if seen is None else seen > 0, samples, positions)

    def _masked(self, products: Tensor, samples: slice, rows: slice) -> tuple[Tensor, Tensor | None]:
        reading, sampled, width = self.reading, self.queries.sampled, products.shape[-1]
        if reading.mask is None and reading.causal and not sampled:
            logits = masked_logits(products, softcap=reading.softcap)
            seen = logits.new_ones(logits.shape[-2:]).tril(rows.start)
            # The diagonal only affects the square at the end of the block. Any logit plus FAR is FAR in fp32.
            logits[..., rows.start :].add_((1 - seen[:, rows.start :]) * FAR)
            return logits, seen
        positions = self.queries.positions[samples, rows] if sampled else self.queries.positions[:, rows]
        consecutive = None if sampled else rows
        mask = reading.mask_at(samples, positions, consecutive)
        allowed = reading.allowed(samples, positions, consecutive)
        mask, allowed = (None if x is None else x[..., :width] for x in (mask, allowed))
        logits = masked_logits(products, mask, allowed, softcap=reading.softcap, forbidden=FAR)
        return logits, None if allowed is None else allowed.to(logits.dtype)


def blocks(reading: Reading, rows: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices (samples, rows) of blocks of about BLOCK or JOINED logits, each with all heads."""
    per_row = reading.heads * reading.keys
    times = 1 if reading.q.device.type == "cpu" else ON_A_DEVICE
    if per_row * rows <= BLOCK * times:
        step = max(1, JOINED * times // (per_row * rows))
        for start in range(0, reading.batch, step):
            yield slice(start, min(start + step, reading.batch)), slice(0, rows)
        return
    step = max(BLOCK * times // per_row, min(FEWEST_ROWS, LARGEST_BLOCK * times // per_row), 1)
    for sample in range(reading.batch):
        for start in range(0, rows, step):
            yield slice(sample, sample + 1), slice(start, min(start + step, rows))


def block_size(reading: Reading, rows: int) -> int:
    """Return the number of elements of the largest block."""
    sizes = ((s.stop - s.start) * (r.stop - r.start) for s, r in blocks(reading, rows))
    return max(sizes, default=0) * reading.heads * reading.keys


class Memory:
    """Memory for the scores and powers of one block, of the size of the largest block.

    Allocating memory for each block would cost as much as reading it.
    """

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.scores = torch.empty(elements, dtype=dtype, device=device)
        self.powers = torch.empty(elements, dtype=dtype, device=device)


@dataclass(eq=False)
class SoftmaxBlock:
    """The softmax of a block of rows (b,H,r,w), before the division by its sum.

    `depth` and `powers` are in reused memory. Methods that overwrite one of them say so and must be the last to read
    it.

    Attributes:
        depth: logits − top; overwritten by `entropy`.
        powers: exp(depth); overwritten by `weights`.
        top: the largest logit of each row (b,H,r). A learned sink is left out, because above all keys it would make
            their powers underflow.
        total: the sum of powers over the keys (b,H,r).
        beyond: the sink's logit − top (b,H,r); None without sinks.
        seen: 1 for allowed keys and 0 for others; None if all are allowed.
    """

    depth: Tensor
    powers: Tensor
    top: Tensor
    total: Tensor
    beyond: Tensor | None
    seen: Tensor | None

    @classmethod
    def of(cls, logits: Logits, samples: slice, rows: slice, memory: Memory) -> "SoftmaxBlock":
        """Return the block of `samples` and `rows`, computed in `memory`, which is overwritten."""
        sinks = logits.reading.sinks
        scores, seen = logits.block(samples, rows, memory.scores)
        top = scores.amax(-1)
        depth = scores.sub_(top[..., None])
        powers = torch.exp(depth, out=memory.powers[: depth.numel()].view(depth.shape))
        # A sink of -inf is none; as a finite logit it does not make NaN of 0 times infinity.
        beyond = None if sinks is None else (sinks.to(logits.dtype)[:, None] - top).clamp(FAR, -FAR)
        return cls(depth, powers, top, powers.sum(-1), beyond, seen)

    @cached_property
    def log_peak(self) -> Tensor:
        """Return the logarithm of the largest weight of each row (b,H,r)."""
        log_total = self.total.log()
        return -log_total if self.beyond is None else -log_total - softplus(self.beyond - log_total)

    def peak(self) -> Tensor:
        """Return the largest weight of each row (b,H,r)."""
        return 1 / self.total if self.beyond is None else self.log_peak.exp()

    def log_sum_exp(self) -> Tensor:
        """Return log Σ_j exp(s_j) of each row (b,H,r), with a learned sink among its columns."""
        log_total = self.total.log()
        among_columns = log_total if self.beyond is None else torch.logaddexp(log_total, self.beyond)
        return self.top + among_columns

    def lowest(self) -> Tensor:
        """Return the smallest logit of each row among the keys that are not forbidden (b,H,r)."""
        return self.depth.masked_fill(self.depth <= FAR / 2, -FAR).amin(-1) + self.top

    def top_key(self) -> Tensor:
        """Return the position of the key with the largest logit of each row (b,H,r), the first of several."""
        return self.depth.argmax(-1)

    def on_sink(self) -> Tensor:
        """Return the weight of the learned sink in each row (b,H,r), 0 without one."""
        return torch.zeros_like(self.top) if self.beyond is None else torch.sigmoid(self.beyond - self.total.log())

    def centred(self, counts: Tensor) -> Tensor:
        """Return the norm of each row's logits about their mean over `counts` allowed keys."""
        # Forbidden keys, which hold FAR, are multiplied by 0 before and after the mean is subtracted.
        depth = self.depth if self.seen is None else self.depth * self.seen
        mean = depth.sum(-1) / counts
        centred = depth - mean[..., None] if self.seen is None else depth.sub_(mean[..., None]).mul_(self.seen)
        size = torch.linalg.vector_norm(centred, dim=-1)
        if self.beyond is None:
            return size
        return (size.square() + counts / (counts + 1) * (mean - self.beyond).square()).sqrt()

    def entropy(self) -> Tensor:
        """Return the entropy of each row in nats (b,H,r); overwrites `depth`."""
        # Rounding may make the entropy of a row with one key slightly negative.
        among_keys = entropy_of(self.total.log(), self.depth.mul_(self.powers).sum(-1), self.total).clamp_min(0)
        if self.beyond is None:
            return among_keys
        # With a sink: the entropy of the choice between it and the keys, and that among the keys.
        margin = self.total.log() - self.beyond
        against_keys, against_sink = softplus(-margin), softplus(margin)
        return (-against_keys).exp() * (among_keys + against_keys) + (-against_sink).exp() * against_sink

    def weights(self, valid: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the weights (b,H,r,w), 0 in rows where `valid` is 0, and their unit (b,H,1,1); overwrites `powers`.

        The unit is the largest weight of each head's block where a sink may leave only weights so small that their
        squares underflow: then the weights are divided by it, and it is returned as its logarithm. Otherwise it is
        None, for 1.
        """
        if self.beyond is None:
            return self.powers.mul_((valid / self.total)[..., None]), None
        log_peak = torch.where(valid > 0, self.log_peak, -torch.inf)
        unit = log_peak.amax(-1, keepdim=True).clamp_min(FAR)
        return self.powers.mul_((log_peak - unit).exp()[..., None]), unit[..., None]
