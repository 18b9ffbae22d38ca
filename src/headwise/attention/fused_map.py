"""The map v -> A v by the fused kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.kernels.row_statistics import attend_rows
from headwise.attention.matrix_free_readings import sink_share
from headwise.attention.softmax import fused, fused_causal, takes_causal_and_mask
from headwise.core.call import Call


class FusedMap:
    """The map v -> A v by the fused kernel, for q, k, a mask and columns that are kept."""

    def __init__(self, call: Call, q: Tensor, k: Tensor, keep: Tensor | None) -> None:
        self.q, self.k, self.scale, self.dropout = q, k, call.scale, call.dropout
        self.mask, self.causal, self.width = call.mask, call.causal, 0
        self.sinks, self.columns = call.sinks, None
        if keep is None:
            return
        if self.mask is None and not self.causal:
            self.mask = keep
        elif self.mask is None and keep.shape[2] == 1:
            if self._takes_both(call):
                self.columns = torch.zeros(keep.shape, dtype=q.dtype, device=q.device).masked_fill(~keep, float("-inf"))
            else:
                self._widen(keep)
        else:
            # The kernel takes a mask or causality: one mask stands for both.
            allowed = call.allowed()
            kept = keep if allowed is None else keep & allowed
            additive = self.mask is not None and self.mask.dtype != torch.bool
            self.mask = self.mask.masked_fill(~kept, float("-inf")) if additive and self.mask is not None else kept
            self.causal = False

    def _takes_both(self, call: Call) -> bool:
        """Return whether torch's own kernel for CPUs serves the call: it takes causality and a mask at once, which the
        public function refuses."""
        plain = call.dropout == 0 and call.sinks is None and call.v.shape[-1] == self.q.shape[-1] and self.q.numel() > 0
        return plain and self.q.device.type == "cpu" and takes_causal_and_mask()

    def _widen(self, keep: Tensor) -> None:
        # Causal with dropped columns: one more coordinate puts them at -infinity, so no T x N mask is needed.
        # Up to the next multiple of 8, for which kernels are made.
        self.width = 8 - self.q.shape[-1] % 8
        # fp16 ends at 65,504. exp() of either is 0 in every dtype; infinities would make nan of 0 * inf in the
        # products.
        far = -6e4 if self.k.dtype == torch.float16 else -1e9
        extra = torch.where(keep[:, :, 0, :, None], 0.0, far).to(self.k.dtype)
        self.k = torch.cat([self.k, F.pad(extra, (0, self.width - 1)).expand(*self.k.shape[:3], self.width)], dim=-1)
        one = torch.ones_like(self.q[..., :1])
        self.q = torch.cat([self.q, F.pad(one, (0, self.width - 1))], dim=-1)

    def __call__(self, v: Tensor) -> Tensor:
        size = v.shape[-1]
        if self.width:
            v = F.pad(v, (0, self.q.shape[-1] - size))
        o = self._fused(v) if self.sinks is None else self._beside_a_sink(v)
        return o[..., :size] if self.width else o

    def _fused(self, v: Tensor) -> Tensor:
        q, k, scale = self.q, self.k, self.scale
        if self.columns is not None and v.shape[-1] == q.shape[-1]:
            return fused_causal(q, k, v, self.columns, scale)
        if self.columns is not None:
            # That kernel takes values as wide as queries alone; wider ones, of several heads side by side, take a
            # matrix anyway.
            order = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
            return fused(q, k, v, attn_mask=(self.columns == 0) & order, scale=scale)
        return fused(q, k, v, attn_mask=self.mask, dropout_p=self.dropout, is_causal=self.causal, scale=scale)

    def _beside_a_sink(self, v: Tensor) -> Tensor:
        """Return A v where one more column, of logit b and without a value, takes weight."""
        assert self.sinks is not None
        out, lse, _, _ = attend_rows(self.q, self.k, v, self.mask, self.causal, self.scale)
        return out * sink_share(lse, self.sinks).unsqueeze(-1).to(out.dtype)
