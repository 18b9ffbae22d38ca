"""A character language model of tiny Shakespeare, whose attention and MLPs can have separate weight decay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from headwise.lab.experiments.evaluation import Sums
from headwise.study import DataSet, Evaluation, Metric, StudyError, Task
from headwise_papers.data import tinyshakespeare
from headwise_papers.tasks.causal_attention import CausalAttention

# the parts of the text in each split, in order
SHARES = {"train": (0.0, 0.8), "validation": (0.8, 0.9), "test": (0.9, 1.0)}
# number of training and validation windows that are evaluated at the end
WINDOWS = 200
# number of different characters in the text
CHARACTERS = 65


class CharacterLM(Task):
    """Prediction of the next character of tiny Shakespeare."""

    # the perplexity of a uniform guess
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("perplexity", "perplexity per character", higher_is_better=False, failure=float(CHARACTERS)),
        Metric("loss", higher_is_better=False, unit="nats per character"),
    )

    context: int = 64
    dim: int = 64
    heads: int = 4
    depth: int = 4
    mlp_ratio: int = 4

    def model(self) -> CharacterModel:
        """Return a pre-norm decoder."""
        return CharacterModel(CHARACTERS, self.context, self.dim, self.heads, self.depth, self.mlp_ratio)

    def data(self, split: str) -> tuple[Tensor, Tensor]:
        """Return characters (N, context) as indices, and the characters that follow them.

        The first 80 % of the text are for training, the next 10 % for validation and the last 10 % for the test.
        """
        text = tinyshakespeare.read(self.folder)
        characters = sorted(set(text))
        if len(characters) != CHARACTERS:
            raise StudyError(
                f"the text has {len(characters)} different characters, tiny Shakespeare has {CHARACTERS}: pass its file"
            )
        # by the codes of the characters, all of ASCII: a list of a million numbers takes a second to convert
        numbers = torch.zeros(128, dtype=torch.int64)
        numbers[torch.tensor([ord(character) for character in characters])] = torch.arange(CHARACTERS)
        first, last = (int(share * len(text)) for share in SHARES[split])
        codes = torch.frombuffer(bytearray(text[first:last], "ascii"), dtype=torch.uint8)
        windows = numbers[codes.long()].unfold(0, self.context + 1, self.context)
        return windows[:, :-1], windows[:, 1:]

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations, with fewer windows of the training and validation data."""
        return [Evaluation("train", limit=WINDOWS), Evaluation("validation", limit=WINDOWS)]

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy per character, in nats."""
        return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())

    def count(self, output: Tensor, targets: Tensor) -> Sums:
        """Return the summed loss and the number of characters."""
        return {"nats": self.loss(output, targets) * targets.numel(), "characters": torch.tensor(targets.numel())}

    def finish(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the loss in nats per character, and the perplexity."""
        loss = sums["nats"] / sums["characters"]
        return {"loss": loss, "perplexity": loss.exp()}

    def files(self) -> list[Path]:
        """Return the files of the text."""
        return tinyshakespeare.files(self.folder)

    def data_sets(self) -> list[DataSet]:
        """Return the data sets of the task."""
        return [tinyshakespeare.SOURCE.described()]

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Download the text if it is missing, and check it."""
        tinyshakespeare.prepare(self.folder, tell)


class CharacterModel(nn.Module):
    """A causal language model, from tokens (B, T) to logits (B, T, symbols)."""

    def __init__(self, symbols: int, context: int, dim: int, heads: int, depth: int, mlp_ratio: int) -> None:
        super().__init__()
        self.symbols, self.positions = nn.Embedding(symbols, dim), nn.Embedding(context, dim)
        self.blocks = nn.Sequential(*(DecoderBlock(dim, heads, mlp_ratio * dim) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, symbols, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next token."""
        x = self.symbols(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class DecoderBlock(nn.Module):
    """A pre-norm block of causal attention and MLP."""

    def __init__(self, dim: int, heads: int, mlp_dim: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), CausalAttention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, mlp_dim), nn.GELU(), nn.Linear(mlp_dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))
