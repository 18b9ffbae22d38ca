"""A translation model: encoder and decoder of equal depth, and one embedding for both sides and the output."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwise_papers.tasks import deep_norm
from headwise_papers.tasks.byte_pairs import BEGIN, END, PAD
from headwise_papers.tasks.transformer_layers import DecoderLayer, EncoderLayer, SumNorm, sinusoids


class Translator(nn.Module):
    """A model that returns the logits (B, T, vocabulary) of the token after each prefix of `target` (B, T).

    The input is `source` (B, S). Without a target the model returns the memory (B, S, D), which it accepts together
    with a target to avoid encoding the source again.
    """

    # a checkpoint of another vocabulary is refused, even if all its shapes fit
    same_in_checkpoints = ("digest",)
    digest: Tensor

    def __init__(
        self,
        vocabulary: int,
        digest: Tensor,
        *,
        dim: int,
        depth: int,
        heads: int,
        mlp_dim: int,
        norm: SumNorm,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.register_buffer("digest", digest.clone())
        self.words = nn.Embedding(vocabulary, dim, padding_idx=PAD)
        nn.init.normal_(self.words.weight, std=dim**-0.5)
        sizes = (dim, heads, mlp_dim, norm)
        first, second = deep_norm.encoder_and_decoder(depth, depth)
        deep = norm == "deep"
        scales = (first.alpha, second.alpha) if deep else (1.0, 1.0)
        self.encoder = nn.ModuleList(EncoderLayer(*sizes, scale=scales[0], dropout=dropout) for _ in range(depth))
        self.decoder = nn.ModuleList(DecoderLayer(*sizes, scale=scales[1], dropout=dropout) for _ in range(depth))
        for stack, constants in ((self.encoder, first), (self.decoder, second)):
            for layer in stack if deep else ():
                deep_norm.initialise(layer, constants.beta)
        self.norm1, self.norm2 = (nn.LayerNorm(dim) if norm == "pre" else nn.Identity() for _ in range(2))

    def forward(self, source: Tensor, target: Tensor | None = None, memory: Tensor | None = None) -> Tensor:
        padding = source == PAD
        if memory is None:
            memory = self.read(source, padding)
        return memory if target is None else self.write(target, memory, padding)

    def read(self, source: Tensor, padding: Tensor) -> Tensor:
        """Return the memory (B, S, D)."""
        x = self.embed(source)
        for layer in self.encoder:
            x = layer(x, padding)
        return self.norm1(x)

    def write(self, target: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        """Return the logits (B, T, vocabulary) of the token after each prefix."""
        hidden = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).triu(1)
        # No earlier token sees what is behind a sentence: the mask tells statistics and penalties not to count it.
        ended = (target == END) | (target == PAD)
        x = self.embed(target)
        for layer in self.decoder:
            x = layer(x, hidden, ended, memory, padding)
        return nn.functional.linear(self.norm2(x), self.words.weight)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens plus their positions."""
        dim = self.words.embedding_dim
        return self.words(tokens) * dim**0.5 + sinusoids(tokens.shape[1], dim).to(self.words.weight)


def greedy(model: nn.Module, source: Tensor, longest: int) -> Tensor:
    """Return the most likely token at each step (B, at most `longest`), until all sentences end; PAD follows END."""
    memory = model(source)
    written = torch.full_like(source[:, :1], BEGIN)
    ended = torch.zeros_like(written, dtype=torch.bool)
    for _ in range(longest):
        token = model(source, written, memory)[:, -1:].argmax(-1).masked_fill(ended, PAD)
        written, ended = torch.cat([written, token], 1), ended | (token == END)
        if bool(ended.all()):
            break
    return written[:, 1:]
