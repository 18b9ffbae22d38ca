"""Readings of the attention weights from row statistics, without the T x N matrix."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from headwise.attention.kernels.row_statistics import attend_rows
from headwise.attention.softmax import fused
from headwise.core.call import Call


class MatrixFreeReadings:
    """Readings of A (after masks and logit edits, before weight edits) without the matrix."""

    def __init__(self, call: Call, q: Tensor, k: Tensor, keep: Tensor | None) -> None:
        self.call, self.q, self.k, self._keep = call, q, k, keep
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
        if self._statistics is None:
            self._statistics = attend_rows(self.q, self.k, self.call.v, self.mask, self.causal, self.call.scale)
        return self._statistics

    def _share(self) -> Tensor | None:
        """Return the share of weight that a sink leaves to the keys of each row, (B, H, T), or None without sinks."""
        sinks = self.call.sinks
        return None if sinks is None else sink_share(self._rows()[1], sinks)

    def output(self) -> Tensor | None:
        """Return A v if reading the statistics has already computed it, else None."""
        if self._statistics is None:
            return None
        out, share = self._statistics[0], self._share()
        return out if share is None else out * share.unsqueeze(-1).to(out.dtype)

    def lse(self) -> Tensor:
        """Return the log-sum-exp of each row of logits, (B, H, T) in fp32 or wider; 0 in a row without allowed keys."""
        lse, mask, allowed = self._rows()[1], self.call.mask, self.call.allowed()
        if allowed is None or mask is None or mask.dtype == torch.bool:
            return lse
        # An additive mask leaves its own value there, often the lowest of a dtype, whose square is infinite.
        return lse.masked_fill(~allowed.any(-1), 0.0)

    def entropy(self) -> Tensor:
        """Return the entropy of each row in nats, (B, H, T) in fp32 or wider; 0 in a row without allowed keys."""
        entropy, sinks, allowed = self._rows()[2], self.call.sinks, self.call.allowed()
        if sinks is None:
            return entropy
        # Weights c·p with Σp = 1 have entropy c·(H - log c). log c is computed from the logits, as c may be 0 in fp32.
        above = self.lse() - _per_head(sinks, entropy)
        entropy = above.sigmoid() * (entropy - logsigmoid(above))
        return entropy if allowed is None else entropy.masked_fill(~allowed.any(-1), 0.0)

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


def sink_share(lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the share of weight that sinks with logits b (H,) leave to the keys: sigmoid(lse - b), (B, H, T)."""
    return torch.sigmoid(lse - _per_head(sinks, lse))


def _per_head(sinks: Tensor, rows: Tensor) -> Tensor:
    """Return the logits of sinks (H,) with the dtype and dimensions of rows (B, H, T)."""
    return sinks.to(rows.dtype).view(1, -1, 1)
