"""The models whose training steps are counted and measured: GPT-2 small and ViT-B/16, with as many layers as asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS = 768, 12
LAYERS = 12
Batch = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Self attention with one matrix for queries, keys and values."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.qkv, self.proj, self.causal = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm layer of a transformer."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.first, self.attention, self.second = nn.LayerNorm(WIDTH), Attention(causal), nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


class Gpt(nn.Module):
    """GPT-2 small."""

    def __init__(self, layers: int, words: int = 50304, tokens: int = 1024) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, WIDTH), nn.Embedding(tokens, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block(True) for _ in range(layers)), nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


class Vit(nn.Module):
    """ViT-B/16 on images of 224 by 224."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(torch.zeros(1, 197, WIDTH))
        self.blocks, self.norm = nn.ModuleList(Block(False) for _ in range(layers)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 1000)

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]).float(), target)


def _gpt_batch(batch: int, tokens: int = 1024) -> Batch:
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    return ids, ids


def _vit_batch(batch: int) -> Batch:
    return torch.zeros(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)


@dataclass(frozen=True)
class Training:
    """A model and its training.

    Attributes:
        whole: builds the model with so many of its `LAYERS` layers.
        layers: builds so many layers with what little is needed around them.
        batch: gives a batch of a size.
        size: the batch's size in training.
        example: gives a small batch.
    """

    whole: Callable[[int], nn.Module]
    layers: Callable[[int], nn.Module]
    batch: Callable[[int], Batch]
    size: int
    example: Callable[[], Batch]


MODELS = {
    "GPT-2 small": Training(Gpt, lambda layers: Gpt(layers, words=256), _gpt_batch, 16, lambda: _gpt_batch(1, 8)),
    "ViT-B/16": Training(Vit, Vit, _vit_batch, 128, lambda: _vit_batch(1)),
}
