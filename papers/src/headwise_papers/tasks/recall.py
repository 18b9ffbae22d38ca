"""Associative recall: pairs of a key and a value, then keys whose values are to be recalled, by attention alone."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from headwise.study import Evaluation, Task
from headwise_papers.tasks.causal_attention import CausalAttention

KEYS, VALUES = 32, 16
# numbers of training and test sequences
TRAIN, TEST = 40_000, 1000


class AssociativeRecall(Task):
    """Recall of the values that follow the queried keys; part of the training labels is random."""

    failure: ClassVar[float | None] = 1 / VALUES

    pairs: int = Field(20, ge=1, le=KEYS, description="pairs of a key and its value, each key once")
    queries: int = Field(10, ge=1, description="keys that are asked for, each once")
    random_labels: float = Field(0.05, ge=0, le=1, description="share of the training labels drawn at random")
    dim: int = 64
    heads: int = 2
    depth: int = 2

    def model(self) -> AttentionAlone:
        """Return a transformer without MLPs."""
        tokens = 2 * self.pairs + self.queries
        return AttentionAlone(KEYS + VALUES, VALUES, tokens, self.queries, self.dim, self.heads, self.depth)

    def data(self, split: str) -> tuple[Tensor, Tensor] | None:
        """Return tokens (N, 2 · pairs + queries), keys first in the vocabulary, and values (N, queries)."""
        if split == "validation":
            return None
        if self.queries > self.pairs:
            raise ValueError(f"{self.queries} queries need as many pairs, got {self.pairs}")
        generator = torch.Generator().manual_seed(int(split == "test"))
        count = TEST if split == "test" else TRAIN
        keys = _drawn(count, KEYS, self.pairs, generator)
        values = torch.randint(VALUES, (count, self.pairs), generator=generator)
        queried = _drawn(count, self.pairs, self.queries, generator)
        targets = values.gather(1, queried)
        if split == "train":
            wrong = torch.rand(targets.shape, generator=generator) < self.random_labels
            targets = torch.where(wrong, torch.randint(VALUES, targets.shape, generator=generator), targets)
        pairs = torch.stack([keys, values + KEYS], dim=2).flatten(1)
        return torch.cat([pairs, keys.gather(1, queried)], dim=1), targets

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations, with as many training examples as test examples."""
        return [Evaluation("train", limit=TEST)]

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy per queried key, in nats."""
        return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


class AttentionAlone(nn.Module):
    """Layers of attention, each with a norm before it, without MLPs; the output are logits (B, asked, values) of the
    last tokens."""

    def __init__(self, symbols: int, values: int, tokens: int, asked: int, dim: int, heads: int, depth: int) -> None:
        super().__init__()
        self.asked = asked
        self.symbols, self.positions = nn.Embedding(symbols, dim), nn.Embedding(tokens, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.layers = nn.ModuleList(CausalAttention(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, values)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the queried keys' values."""
        x = self.symbols(tokens) + self.positions.weight
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(self.norm(x[:, -self.asked :]))


def _drawn(count: int, among: int, chosen: int, generator: torch.Generator) -> Tensor:
    """Return `chosen` different numbers below `among` for each of `count` sequences."""
    return torch.rand(count, among, generator=generator).argsort(1)[:, :chosen]
