"""A causal transformer over word indices: learned positions, pre-norm or post-norm."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# pre: x + f(norm(x)), with a norm at the end; post: norm(x + f(x)), as in Vaswani et al. 2017 (arXiv 1706.03762)
NormOrder = Literal["pre", "post"]


class FusedCausalAttention(nn.Module):
    """Causal self-attention by fused scaled dot-product attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class CausalBlock(nn.Module):
    """A block of attention and MLP, each with a norm before it or after the sum."""

    def __init__(self, dim: int, heads: int, mlp_dim: int, norm: NormOrder, dropout: float) -> None:
        super().__init__()
        self.post = norm == "post"
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = FusedCausalAttention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, mlp_dim), nn.GELU(), nn.Linear(mlp_dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.norm1(x + self.dropout(self.attn(x)))
            return self.norm2(x + self.dropout(self.mlp(x)))
        x = x + self.dropout(self.attn(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class CausalTransformer(nn.Module):
    """A language model that returns the logits (B, T, words) of each next word; T is at most `context`."""

    def __init__(
        self,
        words: int,
        *,
        context: int,
        dim: int,
        depth: int,
        heads: int,
        mlp_dim: int,
        norm: NormOrder = "pre",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, dim)
        self.positions = nn.Parameter(0.02 * torch.randn(context, dim))
        nn.init.normal_(self.words.weight, std=0.02)
        self.blocks = nn.Sequential(*(CausalBlock(dim, heads, mlp_dim, norm, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim) if norm == "pre" else nn.Identity()
        self.head, self.dropout = nn.Linear(dim, words), nn.Dropout(dropout)

    def forward(self, words: Tensor) -> Tensor:
        x = self.dropout(self.words(words) + self.positions[: words.shape[1]])
        return self.head(self.norm(self.blocks(x)))
