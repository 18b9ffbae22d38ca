"""A small causal language model on WikiText-2 (Merity et al. 2016, arXiv 1609.07843), tested by segments and by a
sliding window."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from headwise.lab.experiments.evaluation import Sums
from headwise.study import DataSet, Evaluation, Metric, Task
from headwise_papers.data import wikitext2
from headwise_papers.tasks.causal_transformer import CausalTransformer, NormOrder

UNKNOWN, NOT_COUNTED = 0, -100
# loss in nats per word of a model that knows only word frequencies, with a vocabulary of 2,000 words
UNIGRAM = 4.694


class LanguageModel(Task):
    """Prediction of the next word or character of WikiText-2.

    Words beyond the most frequent ones of the training text are one unknown word, so perplexities are comparable only
    at the same `vocabulary`. The share of unknown words is an outcome.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("perplexity", higher_is_better=False),
        Metric("loss", "nats per word", higher_is_better=False, unit="nats"),
        Metric("unknown", "unknown words", higher_is_better=False, unit="%"),
    )

    steps: int | None = 300
    batch_size: int = 8
    evaluation_batch_size: int = 64
    learning_rate: float = 1e-3
    schedule: Literal["constant", "cosine", "linear", "inverse_sqrt", "plateau"] = "cosine"
    warmup: float = 30
    clip: float | None = 1.0
    level: Literal["words", "characters"] = "words"
    vocabulary: int = Field(
        2000, ge=2, description="words or characters that are distinguished, the most frequent ones and the unknown one"
    )
    context: int = Field(64, ge=1, description="words or characters that a prediction may use")
    window_words: int | None = Field(
        512, ge=1, description="words at the start of the test text that a sliding window is moved over; None: all"
    )
    dim: int = 64
    depth: int = 4
    heads: int = 2
    mlp_dim: int = 256
    norm: NormOrder = "pre"
    dropout: float = Field(0.0, ge=0, lt=1, description="of what enters the blocks and of every branch")

    def all_metrics(self) -> tuple[Metric, ...]:
        """Return the metrics; a diverged run counts as a uniform guess, whose perplexity is the number of words."""
        guess = float(self.vocabulary)
        return tuple(dataclasses.replace(m, failure=guess) if m.name == "perplexity" else m for m in self.metrics)

    def model(self) -> CausalTransformer:
        """Return the model."""
        shape = self.model_dump(include={"context", "dim", "depth", "heads", "mlp_dim", "norm", "dropout"})
        return CausalTransformer(self.vocabulary, **shape)

    def data(self, split: str) -> tuple[Tensor, Tensor]:
        """Return segments (N, context) of the text and each next word; for "window", those of the sliding window."""
        codes = self._codes("test" if split == "window" else split)
        if split == "window":
            return sliding(codes if self.window_words is None else codes[: self.window_words + 1], self.context)
        parts = codes.unfold(0, self.context + 1, self.context)
        return parts[:, :-1], parts[:, 1:]

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of the words that count, in nats."""
        return F.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=NOT_COUNTED)

    def weight(self, targets: Tensor) -> Tensor:
        """Return the number of words that count."""
        return (targets != NOT_COUNTED).sum()

    def count(self, output: Tensor, targets: Tensor) -> Sums:
        """Return the summed loss and the numbers of words and of unknown words."""
        words = self.weight(targets)
        return {
            "loss": self.loss(output, targets).double() * words,
            "words": words,
            "unknown": (targets == UNKNOWN).sum(),
        }

    def finish(self, sums: dict[str, Tensor]) -> dict[str, Any]:
        """Return the perplexity, the loss per word and the share of unknown words."""
        loss = sums["loss"] / sums["words"]
        return {"perplexity": loss.exp(), "loss": loss, "unknown": sums["unknown"] / sums["words"]}

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations: the test text by segments ("test") and by a sliding window ("window")."""
        return [Evaluation("train", when="never"), Evaluation("validation", when="end"), Evaluation("window")]

    def files(self) -> list[Path]:
        """Return the files of the texts."""
        return wikitext2.files(self.folder)

    def data_sets(self) -> list[DataSet]:
        """Return the data sets of the task."""
        return [wikitext2.SOURCE.described()]

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Find or download the texts."""
        wikitext2.prepare(self.folder, tell)

    def _codes(self, split: str) -> Tensor:
        return encode(self.folder, split, self.level, self.vocabulary)


def sliding(codes: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return windows (N, context) shifted by one word each; only the last word counts, except in the first window.

    Al-Rfou et al. 2019 (arXiv 1808.04444): every word that counts, but for the first ones, has a full context.
    """
    parts = codes.unfold(0, context + 1, 1)
    inputs, targets = parts[:, :-1], parts[:, 1:].clone()
    targets[1:, :-1] = NOT_COUNTED
    return inputs, targets


@lru_cache(maxsize=4)
def symbols(folder: Path | None, level: str, vocabulary: int) -> dict[str, int]:
    """Return the indices of the most frequent words or characters of the training text, after the unknown one.

    The end of a line counts as a word, as in the published results on WikiText.
    """
    counts = Counter(split_text(wikitext2.read(folder, "train"), level)).most_common()
    kept_symbols = [symbol for symbol, _ in counts if symbol != "<unk>"]
    return {symbol: number for number, symbol in enumerate(["<unk>", *kept_symbols[: vocabulary - 1]])}


@lru_cache(maxsize=8)
def encode(folder: Path | None, split: str, level: str, vocabulary: int) -> Tensor:
    """Return a split of the text as indices (N,)."""
    indices = symbols(folder, level, vocabulary)
    return torch.tensor([indices.get(symbol, UNKNOWN) for symbol in split_text(wikitext2.read(folder, split), level)])


def split_text(text: str, level: str) -> list[str]:
    """Return the words of a text, with ends of lines as words, or its characters."""
    return list(text) if level == "characters" else text.replace("\n", " <eos> ").split()
