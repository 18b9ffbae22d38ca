"""Causal attention with separate projections, without bias or rotary positions, for studies of decay and low rank."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class CausalAttention(nn.Module):
    """Causal self-attention, from (B, T, C) to (B, T, C)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"{heads} heads do not divide the width {dim}; choose a width that they divide")
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of all heads' outputs."""
        batch, tokens, _ = x.shape
        q, k, v = (
            part(x).view(batch, tokens, self.heads, -1).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, tokens, -1))
