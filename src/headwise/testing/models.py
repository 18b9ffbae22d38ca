"""Small models, each with a batch, on which methods are checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Host:
    """A model with a batch.

    Attributes:
        make: builds the model.
        batch: returns positional and keyword arguments of a call.
        unseen: (B, T), True for tokens that no other token may see; None if each sees all. With it, the first argument
            of the model is x (B, T, C).
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    unseen: Tensor | None = None

    def run(self, model: Callable[..., Any], batch: tuple[tuple[Any, ...], dict[str, Any]] | None = None) -> Tensor:
        """Return the model's output for a batch, by default its own."""
        args, kwargs = batch or self.batch()
        out = model(*args, **kwargs)
        return out if isinstance(out, Tensor) else out[0]

    def example(self) -> Any:
        """Return the batch in the form of `regularize(example=...)`."""
        args, kwargs = self.batch()
        return kwargs or args


class Attention(nn.Module):
    """Attention with one stacked projection for q, k and v, as in timm."""

    def __init__(self, dim: int = 32, heads: int = 4, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention branch."""
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        o = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=p)
        return self.proj(o.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    """A pre-norm layer of a transformer."""

    def __init__(self, dim: int, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads, causal, dropout)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return x with both branches added."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Own(nn.Module):
    """A pre-norm transformer on vectors that calls F.scaled_dot_product_attention."""

    def __init__(
        self, depth: int = 2, dim: int = 32, heads: int = 4, causal: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(dim, heads, causal, dropout) for _ in range(depth)])
        self.head = nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Return five numbers per token."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Encoder(nn.Module):
    """torch's own encoder, whose layers attend by nn.MultiheadAttention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return five numbers per token; `padding` (B, T) is True for padding tokens."""
        return self.head(self.encoder(x, src_key_padding_mask=padding))


def vectors(batch: int = 3, tokens: int = 9) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch of random tokens."""
    return (torch.randn(batch, tokens, 32, generator=torch.Generator().manual_seed(5)),), {}


PADDING = torch.arange(9) >= torch.tensor([9, 6, 9])[:, None]
LAST = torch.arange(9).expand(3, 9) == 8
MODELS = {
    "a model with plain attention": Host(Own, vectors),
    "a causal model": Host(lambda: Own(causal=True), vectors, LAST),
    "torch's encoder": Host(Encoder, vectors),
    "torch's encoder with padding": Host(Encoder, lambda: ((*vectors()[0], PADDING), {}), PADDING),
}


def fresh(host: Host, seed: int = 0) -> nn.Module:
    """Return the host's model with the same weights every time."""
    torch.manual_seed(seed)
    return host.make().train()
