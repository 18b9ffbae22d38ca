"""Models and data that the study of the alarms has not: photographs, padded sentences, and GPT-2."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn

from headwise.files.optional_imports import load
from headwise_papers.alarms.models import CONTEXT, Family, Size, SmallViT, Text
from headwise_papers.data import cifar, sst2, tinyshakespeare

# words of the vocabulary, beside padding (0) and any other word (1); words of a sentence; sentences
WORDS, LONGEST, SENTENCES = 2_000, 24, 6_000


class Photographs(Family):
    """A vision transformer on CIFAR-10 in 16 patches."""

    name = "photographs"
    sizes = (Size(64, 3), Size(64, 2, "post"))
    rate = 2e-3
    batch_size = 32
    classes = 10

    def model(self, size: Size) -> SmallViT:
        model = SmallViT(size)
        model.patch = nn.Conv2d(3, size.dim, 8, 8)
        return model

    @lru_cache(1)  # noqa: B019  (families live as long as the study)
    def _all(self) -> tuple[Tensor, Tensor]:
        images, labels = cifar.read(cifar.SOURCES["cifar10"], "train", self.folder)
        return images[:5_400].float() / 127.5 - 1, labels[:5_400].long()

    def batch(self, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        images, labels = self._all()
        index = 400 + torch.randint(len(labels) - 400, (self.batch_size,), generator=draw)
        return images[index], labels[index]

    def held_out(self) -> tuple[Tensor, Tensor]:
        images, labels = self._all()
        return images[:400], labels[:400]

    def outliers(self, inputs: Tensor, share: float, draw: torch.Generator) -> Tensor:
        return torch.where(torch.rand(inputs.shape, generator=draw) < share, 20.0, inputs)


class SentenceEncoder(nn.Module):
    """An `nn.TransformerEncoder` that returns the logits (B, 2) of padded sentences (B, words)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS + 2, size.dim)
        self.positions = nn.Parameter(0.02 * torch.randn(LONGEST, size.dim))
        layer = nn.TransformerEncoderLayer(
            size.dim, 4, 4 * size.dim, dropout=0.1, batch_first=True, norm_first=size.norm == "pre"
        )
        self.encoder = nn.TransformerEncoder(layer, size.depth, enable_nested_tensor=False)
        self.head = nn.Linear(size.dim, 2)
        # whether padding is masked
        self.masks = True

    def forward(self, words: Tensor) -> Tensor:
        padded = words == 0
        x = self.words(words) + self.positions
        x = self.encoder(x, src_key_padding_mask=padded if self.masks else None)
        return self.head(x.masked_fill(padded[..., None], 0.0).sum(1) / (~padded).sum(1, keepdim=True))


class Sentences(Family):
    """A padded encoder with dropout on the sentences of SST-2."""

    name = "padded sentences"
    sizes = (Size(48, 2), Size(48, 2, "post"))
    rate = 2e-3
    batch_size = 32
    classes = 2
    has_dropout = True

    def model(self, size: Size) -> SentenceEncoder:
        return SentenceEncoder(size)

    @lru_cache(1)  # noqa: B019  (families live as long as the study)
    def _all(self) -> tuple[Tensor, Tensor]:
        sentences, labels = sst2.read(self.folder, "train")
        lines = [one.split()[:LONGEST] for one in sentences[:SENTENCES]]
        counts: dict[str, int] = {}
        for word in (word for line in lines for word in line):
            counts[word] = counts.get(word, 0) + 1
        numbers = {word: at + 2 for at, word in enumerate(sorted(counts, key=lambda one: (-counts[one], one))[:WORDS])}
        rows = [[numbers.get(word, 1) for word in line] + [0] * (LONGEST - len(line)) for line in lines]
        return torch.tensor(rows), torch.tensor(labels[:SENTENCES])

    def batch(self, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        words, labels = self._all()
        index = 400 + torch.randint(len(labels) - 400, (self.batch_size,), generator=draw)
        return words[index], labels[index]

    def held_out(self) -> tuple[Tensor, Tensor]:
        words, labels = self._all()
        return words[:400], labels[:400]

    def outliers(self, inputs: Tensor, share: float, draw: torch.Generator) -> Tensor:
        return torch.where(torch.rand(inputs.shape, generator=draw) < share, 1, inputs)


class GPT(Text):
    """A transformers GPT-2 with its dropout and fused projections, on characters."""

    name = "GPT-2"
    sizes = (Size(64, 2), Size(48, 3))
    rate = 4e-3
    has_dropout = True

    def text(self) -> str:
        return tinyshakespeare.read(self.folder)

    def model(self, size: Size) -> nn.Module:
        transformers = load("transformers", "hf")
        config = transformers.GPT2Config(
            vocab_size=self.classes,
            n_embd=size.dim,
            n_layer=size.depth,
            n_head=4,
            n_positions=CONTEXT,
            attn_implementation="sdpa",
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        return transformers.GPT2LMHeadModel(config)

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        return model(input_ids=inputs).logits


OTHERS: tuple[type[Family], ...] = (Photographs, Sentences, GPT)
