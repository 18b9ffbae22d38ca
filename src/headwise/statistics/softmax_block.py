"""One block of the softmax of attention, held in memory that is used again for the next block."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.attention.kernels.row_statistics import entropy_of
from headwise.statistics.scan import Logits


class Memory:
    """Two stretches of memory that hold the block at hand; blocks of any size up to the largest fit in.

    Allocating a block anew for each step would cost as much as reading it.
    """

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.scores = torch.empty(elements, dtype=dtype, device=device)
        self.powers = torch.empty(elements, dtype=dtype, device=device)


@dataclass(eq=False)
class SoftmaxBlock:
    """The softmax of a block of rows (b,H,r,w), before it is divided by its sum.

    `depth` and `powers` lie in memory that is given. What spends one of them says so: it must be the last to read it.

    Attributes:
        depth: logits − level; spent by `entropy`.
        powers: exp(depth); spent by `weights`.
        level: the largest number of a row, a learned sink included (b,H,r): exp of what is above it would overflow.
        top: the largest logit of a row (b,H,r).
        total: the sum of powers over all columns (b,H,r), the sink's included.
        beyond: the sink's logit − level (b,H,r); None without sinks.
        seen: 1 for allowed keys and 0 for others, None where all are allowed.
    """

    depth: Tensor
    powers: Tensor
    level: Tensor
    top: Tensor
    total: Tensor
    beyond: Tensor | None
    seen: Tensor | None

    @classmethod
    def of(cls, logits: Logits, samples: slice, rows: slice, memory: Memory) -> "SoftmaxBlock":
        """Computes the block of `samples` and `rows` in the given memory; what lay there before is lost."""
        sinks = logits.reading.sinks
        scores, seen = logits.block(samples, rows, memory.scores)
        top = level = scores.amax(-1)
        if sinks is not None:
            level = torch.maximum(top, sinks.to(logits.dtype)[:, None])
        depth = scores.sub_(level[..., None])
        powers = torch.exp(depth, out=memory.powers[: depth.numel()].view(depth.shape))
        mass = powers.sum(-1)
        beyond = None if sinks is None else sinks.to(logits.dtype)[:, None] - level
        total = mass if beyond is None else mass + beyond.exp()
        return cls(depth, powers, level, top, total, beyond, seen)

    def peak(self) -> Tensor:
        """Return the largest weight of each row (b,H,r)."""
        return (self.top - self.level).exp() / self.total

    def centred(self, counts: Tensor) -> Tensor:
        """Return the norm of each row's logits about their mean over `counts` allowed keys."""
        # Forbidden keys hold FAR: times zero they vanish before the mean and again after it.
        kept = self.depth if self.seen is None else self.depth * self.seen
        mean = kept.sum(-1) / counts
        about = kept - mean[..., None] if self.seen is None else kept.sub_(mean[..., None]).mul_(self.seen)
        size = torch.linalg.vector_norm(about, dim=-1)
        if self.beyond is None:
            return size
        return (size.square() + counts / (counts + 1) * (mean - self.beyond).square()).sqrt()

    def entropy(self) -> Tensor:
        """Return the entropy of each row in nats (b,H,r); spends `depth`."""
        fall = self.depth.mul_(self.powers).sum(-1)
        if self.beyond is not None:
            fall = fall + self.beyond.exp() * self.beyond
        # Rounding may leave the entropy of a row with one key a hair below zero.
        return entropy_of(self.total.log(), fall, self.total).clamp_min(0)

    def weights(self, valid: Tensor) -> Tensor:
        """Return the weights (b,H,r,w), zero in rows where `valid` is; spends `powers`."""
        return self.powers.mul_((valid / self.total)[..., None])
