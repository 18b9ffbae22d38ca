"""Small models on which methods that act on weights are tried."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS = 24, 3


class Attention(nn.Module):
    """One fused stacked projection, causal, as nanoGPT has it; grouped keys where asked."""

    def __init__(self, groups: int = HEADS, bias: bool = True) -> None:
        super().__init__()
        self.n_head, self.groups, self.size = HEADS, groups, WIDTH // HEADS
        self.c_attn = nn.Linear(WIDTH, WIDTH + 2 * groups * self.size, bias=bias)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        kv = self.groups * self.size
        q, k, v = (
            y.unflatten(-1, (-1, self.size)).mT.movedim(-1, -2) for y in self.c_attn(x).split([WIDTH, kv, kv], -1)
        )
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups < HEADS)
        return self.c_proj(o.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two residual attention layers between an embedding and a head."""

    def __init__(self, groups: int = HEADS, bias: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Attention(groups, bias) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


def model(seed: int = 0, **options) -> Model:
    """Build the model from a seed."""
    torch.manual_seed(seed)
    return Model(**options)


def ids(batch: int = 2, length: int = 7, seed: int = 0) -> Tensor:
    """Draw token ids."""
    return torch.randint(0, 16, (batch, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the next-token loss."""
    return F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
