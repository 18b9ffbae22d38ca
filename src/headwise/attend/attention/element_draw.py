"""The draw of single attention weights: which elements of a call's matrix stay, block by block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.attend.core.random_draws import elements, least_kept


@dataclass
class Drawn:
    """The draw of one call: which elements of q (B, H, T, D) · k (B, H, N, D)^T stay.

    The other attributes are the arguments of `attend_dropped`.
    """

    q: Tensor
    k: Tensor
    key: Tensor
    salt: int
    p: Tensor
    window: int
    samples: int

    def scale(self) -> float:
        """Return 1 / (1 - p), by which dropout multiplies what it keeps."""
        return 1.0 / (1.0 - float(self.p))

    def block(self, samples: slice, heads: slice, queries: slice, keys: int, dtype: torch.dtype) -> Tensor:
        """Return which of the first keys stay for a block of rows, 1 or 0, (b, h, t, keys)."""
        (batch, all_heads, rows), device = self.q.shape[:3], self.q.device
        shape = [s.stop - s.start for s in (samples, heads, queries)]
        if batch == self.samples and shape[1:] == [all_heads, rows]:
            # Whole samples, whose rows are numbered one after the other.
            each = all_heads * rows
            row = torch.arange(samples.start * each, samples.stop * each, device=device).view(shape)
        else:
            b, h, t = (torch.arange(s.start, s.stop, device=device) for s in (samples, heads, queries))
            b = b // (batch // self.samples)
            row = ((b[:, None, None] * all_heads + h[:, None]) * rows) + t
        kept = elements(self.key, self.salt, row, keys).ge_(least_kept(float(self.p)))
        if self.window > 1:
            alone = kept.clone()
            for step in range(1, min(self.window, keys)):
                kept[..., step:] &= alone[..., :-step]
        return kept.to(dtype)
