"""The blog's methods on text: its block on words, padded for the sentences of SST-2 and causal for the articles of
WikiText-2."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.studies.vision_transformer import NormPlace
from headwise.study import Batch, DataSet, Evaluation, Metric, Task
from headwise_papers.data import sst2, wikitext2
from headwise_papers.tasks.blog_images import ACTING, in_training_mode

PAD, UNKNOWN, CLASS = 0, 1, 2


class WordAttention(nn.Module):
    """Attend with fused scaled dot-product attention, without bias, to real tokens or to those before."""

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
    """Add attention, then an MLP on its normed input: the blog's block; `norm="pre"` norms what enters attention
    too."""

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
    """Read words with the blog's block; learned positions and words begin as N(0, 1)."""

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
        """Return logits of each place (B, T, outputs) where causal, else of the first, the class word (B, outputs);
        `real` (B, T) says what is no padding."""
        x = self.words(words) + self.positions[: words.shape[1]]
        allowed = None if real is None else real[:, None, None, :]
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(self.norm(x if self.causal else x[:, 0]))


class Words(Task):
    """Hold what both tasks on text share: the model's shape, and training examples evaluated with the methods at work
    too."""

    vocabulary: int = 2000
    longest: int = 64
    dim: int = 64
    depth: int = 2
    heads: int = 5
    head_dim: int = 16
    mlp_dim: int = 64
    norm: NormPlace = "mlp"

    def build(self, outputs: int, *, causal: bool) -> WordModel:
        """Build the model over the most frequent words, padding, the unknown and the class word."""
        shape = self.model_dump(include={"longest", "dim", "depth", "heads", "head_dim", "mlp_dim", "norm"})
        return WordModel(words=self.vocabulary + 3, outputs=outputs, causal=causal, **shape)

    def evaluations(self) -> list[Evaluation]:
        """Evaluate the training examples with the methods at work too; validation, which only trials need, at the
        end."""
        return [Evaluation("validation", limit=500), Evaluation(ACTING, split="train", output=in_training_mode)]


class Sentiment(Words):
    """Tell the sentiment of SST-2's sentences from a class word before them; the padding is masked."""

    # chance of two classes
    failure: ClassVar[float | None] = 0.5

    def files(self) -> list[Path]:
        """Name the files."""
        return sst2.files(self.folder)

    def data_sets(self) -> list[DataSet]:
        """Return the data sets of the task."""
        return [sst2.SOURCE.described()]

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Download missing files, and check them."""
        sst2.prepare(self.folder, tell)

    def model(self) -> WordModel:
        """Build the model."""
        return self.build(2, causal=False)

    def data(self, split: str) -> dict[str, Tensor]:
        """Return words (B, T), which of them are real, and 0 or 1."""
        words, labels = sentences(self.folder, split, self.vocabulary, self.longest)
        return {"words": words, "real": words != PAD, "labels": labels}

    def lengths(self, examples: dict[str, Tensor]) -> Tensor:
        """Count the real words: sentences of similar length share a batch."""
        return examples["real"].sum(1)

    def batch(self, examples: dict[str, Tensor], generator: torch.Generator | None) -> Batch:
        """Cut the padding to the longest sentence of the batch."""
        longest = int(self.lengths(examples).max())
        return Batch({name: examples[name][:, :longest] for name in ("words", "real")}, examples["labels"])


class NextWord(Words):
    """Tell the next word of WikiText-2 in pieces of `longest` words; rare words are one unknown word."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("perplexity", higher_is_better=False),
        Metric("accuracy", "next-word accuracy", unit="%"),
    )

    longest: int = 32
    evaluation_batch_size: int = 100

    def files(self) -> list[Path]:
        """Name the files."""
        return wikitext2.files(self.folder)

    def data_sets(self) -> list[DataSet]:
        """Return the data sets of the task."""
        return [wikitext2.SOURCE.described()]

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Download missing files, and check them."""
        wikitext2.prepare(self.folder, tell)

    def model(self) -> WordModel:
        """Build the model."""
        return self.build(self.vocabulary + 3, causal=True)

    def data(self, split: str) -> tuple[Tensor, Tensor]:
        """Return pieces of words (B, T) and the words that follow each of them (B, T)."""
        words = running_words(self.folder, split, self.vocabulary)
        pieces = words.unfold(0, self.longest + 1, self.longest)
        return pieces[:, :-1], pieces[:, 1:]

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return nats per word."""
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())

    def count(self, output: Tensor, targets: Tensor) -> dict[str, Any]:
        """Count words, their loss and those that were foreseen."""
        words = torch.tensor(float(targets.numel()))
        right = (output.argmax(-1) == targets).sum()
        return {"weight": words, "loss": self.loss(output, targets) * words, "accuracy": right}

    def finish(self, sums: dict[str, Tensor]) -> dict[str, Any]:
        """Return means over all words, and the perplexity."""
        found = super().finish(sums)
        return found | {"perplexity": found["loss"].exp()}


def numbered(text: str, known: dict[str, int]) -> list[int]:
    """Return the number of each word between spaces."""
    return [known.get(word, UNKNOWN) for word in text.split()]


@cache
def sentences(folder: Path | None, split: str, vocabulary: int, longest: int) -> tuple[Tensor, Tensor]:
    """Read SST-2's sentences as words (N, longest), padded, each after the class word, and their labels (N,)."""
    read, labels = sst2.read(folder, split)
    known = frequent(sst2.read(folder, "train")[0], vocabulary)
    rows = [[CLASS, *numbered(sentence, known)][:longest] for sentence in read]
    padded = [row + [PAD] * (longest - len(row)) for row in rows]
    return torch.tensor(padded), torch.tensor(labels)


@cache
def running_words(folder: Path | None, split: str, vocabulary: int) -> Tensor:
    """Read all words of a split of WikiText-2 in their order (N,)."""
    return torch.tensor(
        numbered(wikitext2.read(folder, split), frequent([wikitext2.read(folder, "train")], vocabulary))
    )


def frequent(texts: list[str], count: int) -> dict[str, int]:
    """Number the most frequent words of texts, the most frequent first."""
    counts = Counter(word for text in texts for word in text.split())
    return {word: number for number, (word, _) in enumerate(counts.most_common(count), CLASS + 1)}
