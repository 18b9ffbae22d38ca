"""The blog's block on text: with padding for the sentences of SST-2, and causal for the articles of WikiText-2."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.lab.studies.vision_transformer import NormPlace
from headwise.study import Batch, DataSet, Evaluation, Metric, Task
from headwise_papers.data import sst2, wikitext2
from headwise_papers.tasks.blog_images import ACTING, in_training_mode

PAD, UNKNOWN, CLASS = 0, 1, 2


class WordAttention(nn.Module):
    """Fused scaled dot-product attention without bias, causal or to all real tokens."""

    def __init__(self, dim: int, heads: int, head_dim: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(dim, 3 * heads * head_dim, bias=False)
        self.proj = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(self, x: Tensor, allowed: Tensor | None) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=self.causal)
        return self.proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))


class WordBlock(nn.Module):
    """The blog's block: attention, then an MLP with a norm before it; `norm="pre"` has a norm before attention too."""

    def __init__(self, dim: int, heads: int, head_dim: int, mlp_dim: int, causal: bool, norm: NormPlace) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim) if norm == "pre" else nn.Identity()
        self.attn = WordAttention(dim, heads, head_dim, causal)
        self.norm2 = nn.Identity() if norm == "none" else nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, mlp_dim), nn.GELU(), nn.Linear(mlp_dim, dim))

    def forward(self, x: Tensor, allowed: Tensor | None) -> Tensor:
        x = x + self.attn(self.norm1(x), allowed)
        return x + self.mlp(self.norm2(x))


class WordModel(nn.Module):
    """A transformer over words with the blog's block; positions and words are learned from N(0, 1)."""

    def __init__(
        self,
        *,
        words: int,
        outputs: int,
        longest: int,
        dim: int,
        depth: int,
        heads: int,
        head_dim: int,
        mlp_dim: int,
        causal: bool,
        norm: NormPlace,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.words = nn.Embedding(words, dim)
        self.positions = nn.Parameter(torch.randn(longest, dim))
        self.blocks = nn.ModuleList(WordBlock(dim, heads, head_dim, mlp_dim, causal, norm) for _ in range(depth))
        self.norm = nn.Identity() if norm == "none" else nn.LayerNorm(dim)
        self.head = nn.Linear(dim, outputs)

    def forward(self, words: Tensor, real: Tensor | None = None) -> Tensor:
        """Return the logits of each position (B, T, outputs) if causal, else of the class word (B, outputs).

        `real` (B, T) is True for words that are not padding.
        """
        x = self.words(words) + self.positions[: words.shape[1]]
        allowed = None if real is None else real[:, None, None, :]
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(self.norm(x if self.causal else x[:, 0]))


class Words(Task):
    """The base of both tasks on text: the model's shape, and evaluations of training examples with methods active."""

    vocabulary: int = 2000
    longest: int = 64
    dim: int = 64
    depth: int = 2
    heads: int = 5
    head_dim: int = 16
    mlp_dim: int = 64
    norm: NormPlace = "mlp"

    def build(self, outputs: int, *, causal: bool) -> WordModel:
        """Return the model over the most frequent words, padding, the unknown word and the class word."""
        shape = self.model_dump(include={"longest", "dim", "depth", "heads", "head_dim", "mlp_dim", "norm"})
        return WordModel(words=self.vocabulary + 3, outputs=outputs, causal=causal, **shape)

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations, including one of the training examples with methods active."""
        return [Evaluation("validation", limit=500), Evaluation(ACTING, split="train", output=in_training_mode)]


class Sentiment(Words):
    """Classification of the sentiment of SST-2's sentences from a class word before them, with padding masked."""

    # chance for two classes
    failure: ClassVar[float | None] = 0.5

    def files(self) -> list[Path]:
        """Return the files of the texts."""
        return sst2.files(self.folder)

    def data_sets(self) -> list[DataSet]:
        """Return the data sets of the task."""
        return [sst2.SOURCE.described()]

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Download missing files, and check them."""
        sst2.prepare(self.folder, tell)

    def model(self) -> WordModel:
        """Return the model."""
        return self.build(2, causal=False)

    def data(self, split: str) -> dict[str, Tensor]:
        """Return words (B, T), a mask of real words, and labels 0 or 1."""
        words, labels = sentences(self.folder, split, self.vocabulary, self.longest)
        return {"words": words, "real": words != PAD, "labels": labels}

    def lengths(self, examples: dict[str, Tensor]) -> Tensor:
        """Return the numbers of real words, by which sentences are batched."""
        return examples["real"].sum(1)

    def batch(self, examples: dict[str, Tensor], generator: torch.Generator | None) -> Batch:
        """Return the batch with its padding cut to the longest sentence."""
        longest = int(self.lengths(examples).max())
        return Batch({name: examples[name][:, :longest] for name in ("words", "real")}, examples["labels"])


class NextWord(Words):
    """Prediction of the next word of WikiText-2 in pieces of `longest` words; rare words are one unknown word."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("perplexity", higher_is_better=False),
        Metric("accuracy", "next-word accuracy", unit="%"),
    )

    longest: int = 32
    evaluation_batch_size: int = 100

    def files(self) -> list[Path]:
        """Return the files of the texts."""
        return wikitext2.files(self.folder)

    def data_sets(self) -> list[DataSet]:
        """Return the data sets of the task."""
        return [wikitext2.SOURCE.described()]

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Download missing files, and check them."""
        wikitext2.prepare(self.folder, tell)

    def model(self) -> WordModel:
        """Return the model."""
        return self.build(self.vocabulary + 3, causal=True)

    def data(self, split: str) -> tuple[Tensor, Tensor]:
        """Return pieces of words (B, T) and each next word (B, T)."""
        words = running_words(self.folder, split, self.vocabulary)
        pieces = words.unfold(0, self.longest + 1, self.longest)
        return pieces[:, :-1], pieces[:, 1:]

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy per word, in nats."""
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())

    def count(self, output: Tensor, targets: Tensor) -> dict[str, Any]:
        """Return the numbers of words and of correct predictions, and the summed loss."""
        words = torch.tensor(float(targets.numel()))
        right = (output.argmax(-1) == targets).sum()
        return {"weight": words, "loss": self.loss(output, targets) * words, "accuracy": right}

    def finish(self, sums: dict[str, Tensor]) -> dict[str, Any]:
        """Return means over all words, and the perplexity."""
        metrics = super().finish(sums)
        return metrics | {"perplexity": metrics["loss"].exp()}


def numbered(text: str, known: dict[str, int]) -> list[int]:
    """Return the index of each word of a text."""
    return [known.get(word, UNKNOWN) for word in text.split()]


@cache
def sentences(folder: Path | None, split: str, vocabulary: int, longest: int) -> tuple[Tensor, Tensor]:
    """Return SST-2's sentences as padded words (N, longest) after the class word, and their labels (N,)."""
    read, labels = sst2.read(folder, split)
    known = frequent(sst2.read(folder, "train")[0], vocabulary)
    rows = [[CLASS, *numbered(sentence, known)][:longest] for sentence in read]
    padded = [row + [PAD] * (longest - len(row)) for row in rows]
    return torch.tensor(padded), torch.tensor(labels)


@cache
def running_words(folder: Path | None, split: str, vocabulary: int) -> Tensor:
    """Return all words (N,) of a split of WikiText-2 in order."""
    return torch.tensor(
        numbered(wikitext2.read(folder, split), frequent([wikitext2.read(folder, "train")], vocabulary))
    )


def frequent(texts: list[str], count: int) -> dict[str, int]:
    """Return the indices of the most frequent words of texts, the most frequent first."""
    counts = Counter(word for text in texts for word in text.split())
    return {word: number for number, (word, _) in enumerate(counts.most_common(count), CLASS + 1)}
