"""Small models of every host, each with a batch and a loss, for the tests that walk methods x hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Attends with one stacked projection, as timm does."""

    def __init__(self, dim: int = 32, heads: int = 4, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        o = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=p)
        return self.proj(o.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads, causal, dropout)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Own(nn.Module):
    """A pre-norm transformer on vectors that calls F.scaled_dot_product_attention."""

    def __init__(self, depth: int = 2, dim: int = 32, heads: int = 4, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(dim, heads, causal, dropout) for _ in range(depth)])
        self.head = nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class Host:
    """A model, a batch of keyword or positional arguments, and how to get a tensor out."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]

    def run(self, model: nn.Module) -> Tensor:
        args, kwargs = self.batch()
        out = model(*args, **kwargs)
        return out if isinstance(out, Tensor) else out[0]

    def example(self) -> Any:
        args, kwargs = self.batch()
        return kwargs or args


def _vectors(batch: int = 3, tokens: int = 9) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(batch, tokens, 32, generator=torch.Generator().manual_seed(5)),), {}


def _ids(padding: str | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    ids = torch.randint(1, 50, (3, 9), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[1, :4] = 0
    if padding == "right":
        mask[1, 6:] = 0
    return (), {"input_ids": ids, **({} if padding is None else {"attention_mask": mask})}


def _llama(dropout: float = 0.0) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        attention_dropout=dropout,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config)


def _bert(dropout: float = 0.0) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=50,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=dropout,
        initializer_range=0.1,
    )
    return BertForMaskedLM(config)


class Encoder(nn.Module):
    """torch's own encoder, whose layers attend by nn.MultiheadAttention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


HOSTS = {
    "own": Host(Own, _vectors),
    "own-causal": Host(lambda: Own(causal=True), _vectors),
    "own-dropout": Host(lambda: Own(dropout=0.1), _vectors),
    "llama": Host(_llama, lambda: _ids(None)),
    "llama-left-padded": Host(_llama, lambda: _ids("left")),
    "bert-padded": Host(_bert, lambda: _ids("right")),
    "bert-dropout": Host(lambda: _bert(0.1), lambda: _ids(None)),
    "torch": Host(Encoder, _vectors),
    "torch-dropout": Host(lambda: Encoder(0.1), _vectors),
}


def fresh(host: Host, seed: int = 0) -> nn.Module:
    """Make the host's model with the same weights every time."""
    torch.manual_seed(seed)
    return host.make().train()
