"""Attention on the matrix A, as papers write methods: whole, or in blocks of queries recomputed in backward."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headwise.attend.attention.softmax import logits, normalize
from headwise.attend.core import Call, Method
from headwise.numerics.masked import rows_at
from headwise.numerics.precision import at_least_fp32


class MatrixReadings:
    """Readings of A from the matrix of a whole call or of a block of its queries."""

    def __init__(self, call: Call, logits: Tensor, weights: Tensor) -> None:
        self.call, self.logits, self.weights = call, logits, weights

    def lse(self) -> Tensor:
        """Return the log-sum-exp of each row of logits, (B, H, T) in fp32 or wider; 0 in a row without allowed keys."""
        none = (self.logits == float("-inf")).all(-1)
        allowed = self.call.allowed()
        if allowed is not None:
            # An additive mask leaves its own value there, often the lowest of a dtype, whose square is infinite.
            none = none | ~allowed.any(-1)
        # Also filled before the sum, because the gradient of a row of -inf is nan.
        return self.logits.masked_fill(none[..., None], 0.0).logsumexp(-1).masked_fill(none, 0.0)

    def entropy(self) -> Tensor:
        """Return the entropy of each row in nats, (B, H, T) in fp32 or wider; 0 in a row without allowed keys."""
        a = at_least_fp32(self.weights)
        # The clamp keeps the gradient finite where a weight is 0.
        return -(a * a.clamp(min=torch.finfo(a.dtype).tiny).log()).sum(-1)

    def sum_of_squares(self) -> Tensor:
        """Return the sum of squared weights of each row, (B, H, T) in fp32 or wider."""
        return at_least_fp32(self.weights).square().sum(-1)

    def attend(self, z: Tensor) -> Tensor:
        """Return A z for z (B, H, N, D), in the dtype of z."""
        return self.weights.to(z.dtype) @ z

    def overlap(self) -> Tensor:
        """Return the sum over pairs of heads of ‖A_iᵀA_j‖² of each sample, (B,) in fp32 or wider."""
        return overlap_of(at_least_fp32(self.weights), self.call.real_queries())

    def weights_at(self, positions: Tensor) -> Tensor:
        """Return the weights of the queries at `positions` (B, n), as (B, H, n, N)."""
        return rows_at(self.weights, positions)

    def at(self, positions: Tensor) -> MatrixReadings:
        """Return the readings of the queries at `positions` (B, n)."""
        return MatrixReadings(
            self.call.at(positions, rows_at(self.call.q, positions)),
            rows_at(self.logits, positions),
            rows_at(self.weights, positions),
        )


def overlap_of(a: Tensor, real: Tensor | None) -> Tensor:
    """Return Σ_{i<j} ‖A_iᵀA_j‖² (B,) over pairs of heads of weights (B, H, T, N), over the queries `real` (B|1, T)."""
    if real is not None:
        a = a.masked_fill(~real[:, None, :, None], 0.0)
    # One product per head instead of one per pair of heads.
    grams = a @ a.mT
    return (grams.sum(1).square().sum((1, 2)) - grams.square().sum((1, 2, 3))) / 2


# The stages that see rows of the matrix.
ON_ROWS = ("logits", "weights", "read", "read_free")


def on_matrix(call: Call, active: Sequence[Method], need_weights: bool, limit: int) -> tuple[Tensor, Tensor | None]:
    """Return the output and weights computed on the matrix, in blocks of queries if it has more than `limit` entries.

    The matrix is computed whole if the host needs the weights, or if a method that reads or edits it is not `rowwise`.
    Blocks return None for the weights.
    """
    size = call.batch * call.heads * call.keys
    together = any(not m.rowwise and any(map(m.overrides, ON_ROWS)) for m in active)
    whole = need_weights or together or size * call.queries <= limit
    if whole:
        return _matrix(call, active, call.q, call.k, call.v)[:2]
    step = max(1, limit // size)
    outs, sums = [], []
    # Blocks keep `source` alive until backward, and the penalties keep the blocks alive: in one object this would be a
    # reference cycle.
    source = copy.copy(call)
    source.penalties = []
    # A checkpointed block keeps only its queries for backward, so that one block is in memory at a time.
    for start in range(0, call.queries, step):
        part = source.block(slice(start, min(start + step, call.queries)))
        run = partial(_part, part, active)
        if torch.is_grad_enabled():
            out, *penalties = checkpoint(run, part.q, call.k, call.v, use_reentrant=False)
        else:
            out, *penalties = run(part.q, call.k, call.v)
        outs.append(out)
        sums.append(penalties)
    merged = [torch.stack(terms).sum(0) for terms in zip(*sums, strict=True)]
    call.penalties.extend(zip(merged[::2], merged[1::2], strict=True))
    return torch.cat(outs, dim=2), None


# Penalties are returned, because a checkpointed function runs twice and so must have no side effects.
def _part(part: Call, active: Sequence[Method], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    out = _matrix(part, active, q, k, v)[0]
    penalties, part.penalties = part.penalties, []
    return (out, *(x for pair in penalties for x in pair))


def edited_logits(call: Call, methods: Sequence[Method], q: Tensor, k: Tensor) -> Tensor:
    """Return the logits (B, H, T, N) of a call after the edits of methods."""
    s = logits(call, q, k)
    for method in methods:
        if method.overrides("logits"):
            s = method.logits(s, call)
    return s


def _matrix(call: Call, active: Sequence[Method], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = edited_logits(call, active, q, k)
    own = next((m for m in active if m.overrides("normalize")), None)
    if own is None:
        a = normalize(s, call.sinks, empty=call.mask is not None or any(m.overrides("logits") for m in active))
    else:
        a = own.normalize(s, call)
    for method in active:
        if method.overrides("read"):
            method.read(a, call)
        elif method.overrides("read_free") and method.read_free(MatrixReadings(call, s, a), call) is NotImplemented:
            raise TypeError(
                f"{method!r} cannot read this call at {call.site.name}: its read_free() returned NotImplemented and it "
                "has no read(a, call), which reads the matrix; define one"
            )
    for method in active:
        if method.overrides("weights"):
            a = method.weights(a, call)
    if call.dropout > 0:
        a = F.dropout(a, call.dropout)
    return a.to(v.dtype) @ v, a
