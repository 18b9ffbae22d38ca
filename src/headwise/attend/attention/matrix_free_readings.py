"""Readings of A without the matrix: statistics of rows, products with A, and the weights of some queries."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from headwise.attend.attention.flash_rows import attend_with_lse
from headwise.attend.attention.overlap import head_overlap, overlap_runs
from headwise.attend.attention.row_statistics import attend_rows
from headwise.attend.attention.softmax import fused, normalize
from headwise.attend.core import Call
from headwise.numerics.masked import mask_at, masked_logits, rows_at
from headwise.numerics.precision import at_least_fp32


class MatrixFreeReadings:
    """Readings of A (after masks and logit edits, before weight edits) without the matrix."""

    def __init__(self, call: Call, q: Tensor, k: Tensor, keep: Tensor | None) -> None:
        self.call, self.q, self.k, self._keep = call, q, k, keep
        self.one_reader = True
        # The output and the log-sum-exp of each row; entropy and sum of squares where a method asked for them.
        self._statistics: tuple[Tensor, ...] | None = None
        self._masked: tuple[Tensor | None, bool] | None = None

    @property
    def mask(self) -> Tensor | None:
        """Return the mask with dropped keys; computed on first use, because it may be as large as the matrix."""
        return self._mask()[0]

    @property
    def causal(self) -> bool:
        """Return whether the call is causal in addition to the mask."""
        return self._mask()[1]

    def _mask(self) -> tuple[Tensor | None, bool]:
        if self._masked is None:
            self._masked = self._make_mask()
        return self._masked

    def _make_mask(self) -> tuple[Tensor | None, bool]:
        mask, keep = self.call.mask, self._keep
        if keep is None:
            return mask, self.call.causal
        allowed = self.call.allowed()
        kept = keep if allowed is None else keep & allowed
        if mask is None or mask.dtype == torch.bool:
            return kept, False
        return mask.masked_fill(~kept, float("-inf")), False

    def _rows(self) -> tuple[Tensor, ...]:
        if self._statistics is None or len(self._statistics) == 2:
            self._statistics = attend_rows(self.q, self.k, self.call.v, self.mask, self.causal, self.call.scale)
        return self._statistics

    def _lse(self) -> Tensor:
        if self._statistics is None and self.one_reader:
            # As fast as fused attention.
            self._statistics = attend_with_lse(self.q, self.k, self.call.v, self.mask, self.causal, self.call.scale)
        return (self._statistics or self._rows())[1]

    def _share(self) -> Tensor | None:
        """Return the share of weight that a sink leaves to the keys of each row, (B, H, T), or None without sinks."""
        sinks = self.call.sinks
        return None if sinks is None else sink_share(self._lse(), sinks)

    def output(self) -> Tensor | None:
        """Return A v if reading the statistics has already computed it, else None."""
        if self._statistics is None:
            return None
        out, share = self._statistics[0], self._share()
        return out if share is None else out * share.unsqueeze(-1).to(out.dtype)

    def lse(self) -> Tensor:
        """Return the log-sum-exp of each row of logits, (B, H, T) in fp32 or wider; 0 in a row without allowed keys."""
        lse, mask = self._lse(), self.call.mask
        if mask is None or mask.dtype == torch.bool:
            return lse
        # An additive mask leaves its own value there, often the lowest of a dtype, whose square is infinite.
        return self._where_keys(lse)

    def _where_keys(self, rows: Tensor) -> Tensor:
        """Return numbers of rows (B, H, T), 0 in a row without allowed keys."""
        # Without a mask, a causal query sees itself: then no T x N matrix of allowed keys is made.
        allowed = None if self.call.mask is None else self.call.allowed()
        return rows if allowed is None else rows.masked_fill(~allowed.any(-1), 0.0)

    def entropy(self) -> Tensor:
        """Return the entropy of each row in nats, (B, H, T) in fp32 or wider; 0 in a row without allowed keys."""
        entropy, sinks = self._rows()[2], self.call.sinks
        if sinks is None:
            return entropy
        # Weights c·p with Σp = 1 have entropy c·(H - log c). log c is computed from the logits, as c may be 0 in fp32.
        above = self.lse() - _per_head(sinks, entropy)
        return self._where_keys(above.sigmoid() * (entropy - logsigmoid(above)))

    def sum_of_squares(self) -> Tensor:
        """Return the sum of squared weights of each row, (B, H, T) in fp32 or wider."""
        squares, share = self._rows()[3], self._share()
        return squares if share is None else share.square() * squares

    def attend(self, z: Tensor) -> Tensor:
        """Return A z for z (B, H, N, D), in the dtype of z."""
        mask, causal, share = self.mask, self.causal, self._share()
        if mask is not None and causal:
            # The kernel takes either a mask or causality.
            allowed = self.call.allowed()
            assert allowed is not None
            mask = allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, float("-inf"))
            causal = False
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(z.dtype)
        # The kernel takes a single dtype, that of z.
        q, k = self.q.to(z.dtype), self.k.to(z.dtype)
        out = fused(q, k, z, attn_mask=mask, is_causal=causal, scale=self.call.scale)
        return out if share is None else out * share.unsqueeze(-1).to(z.dtype)

    def overlap(self) -> Tensor | None:
        """Return the sum over pairs of heads of ‖A_iᵀA_j‖² of each sample, (B,), or None without a kernel."""
        if not overlap_runs(self.q, self.k):
            return None
        call = self.call
        return head_overlap(
            self.q, self.k, self.lse(), self.mask, call.real_queries(), call.sinks, self.causal, call.scale
        )

    def weights_at(self, positions: Tensor) -> Tensor:
        """Return the weights of the queries at `positions` (B, n), as (B, H, n, N) in the dtype of the queries."""
        # The scale costs less on the queries.
        s = (self._queries_at(positions) * self.call.scale) @ self.k.transpose(-1, -2)
        mask = self.mask
        if self.causal:
            s = s.masked_fill_(torch.arange(self.call.keys, device=s.device) > positions[:, None, :, None], -torch.inf)
        if mask is None and self.call.sinks is None:
            return s.softmax(-1)
        mask = mask_at(mask, False, positions, self.call.keys)
        allowed = mask if mask is not None and mask.dtype == torch.bool else None
        return normalize(masked_logits(at_least_fp32(s), mask, allowed), self.call.sinks, empty=mask is not None)

    def at(self, positions: Tensor) -> MatrixFreeReadings:
        """Return the readings of the queries at `positions` (B, n), computed from these alone."""
        call = copy.copy(self.call)
        call.mask, call.causal = self.mask, self.causal
        part = call.at(positions, self._queries_at(positions))
        # Only the statistics are wanted: the fewer values, the less is computed with them.
        part.v = part.v[..., :16].detach()
        readings = MatrixFreeReadings(part, part.q, self.k, None)
        readings.one_reader = False
        return readings

    def _queries_at(self, positions: Tensor) -> Tensor:
        self.q, rows = _ReadAt.apply(self.q, positions)
        return rows


class _ReadAt(torch.autograd.Function):
    """Return q and its rows at `positions`, (B, H, T, D) and (B, H, n, D).

    Whatever uses q later hands its gradient to this node, which adds those of the rows to it: autograd would make a
    tensor as large as q for them.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(positions)
        return q.view_as(q), rows_at(q, positions)

    @staticmethod
    def backward(ctx: Any, of_q: Tensor, of_rows: Tensor) -> tuple[Tensor, None]:
        (positions,) = ctx.saved_tensors
        # In the order of q in memory, as the sum is contiguous: heads are often within the rows.
        inner = of_q.transpose(1, 2).is_contiguous()
        to, of, dim = (of_q.transpose(1, 2), of_rows.transpose(1, 2), 1) if inner else (of_q, of_rows, 2)
        index = positions[:, :, None, None] if inner else positions[:, None, :, None]
        total = to.scatter_add(dim, index.expand(of.shape), of.to(to.dtype))
        return total.transpose(1, 2) if inner else total, None


def sink_share(lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the share of weight that sinks with logits b (H,) leave to the keys: sigmoid(lse - b), (B, H, T)."""
    return torch.sigmoid(lse - _per_head(sinks, lse))


def _per_head(sinks: Tensor, rows: Tensor) -> Tensor:
    """Return the logits of sinks (H,) with the dtype and dimensions of rows (B, H, T)."""
    return sinks.to(rows.dtype).view(1, -1, 1)
