"""The small tasks of the league's worlds: images, speech, tables and sequences, each run a few seconds or less.

Digits and Cells come with scikit-learn, Pairs is generated; Spelling needs a data set (see docs/data.md).
`augmentation` is one setting with one meaning of its size (0: none, 1: strong) in every task that has one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.lab.studies import digits
from headwise.lab.studies.vision_transformer import NormPlace, VisionTransformer
from headwise.study import Batch, DataSet, Evaluation, Metric, Task
from headwise_papers.data import an4
from headwise_papers.league.tasks import Controls, Dropped, branches
from headwise_papers.tasks.recall import AttentionAlone
from headwise_papers.tasks.transformer_layers import EncoderLayer, SumNorm, sinusoids

# frames of an utterance that are read, and frames of one token
FRAMES, STRIDE = 100, 5
# examples of Cells in validation and test; the rest is for training
CELLS = {"test": slice(0, 260), "validation": slice(260, 400), "train": slice(400, None)}
# of Pairs: symbols of keys and of values; sequences by split
KEYS, VALUES = 12, 8
SEQUENCES = {"train": 6000, "validation": 500, "test": 500}


class Small(Controls):
    """A mixin of the league's small tasks: the controls of its worlds, and augmentation where a task has one."""

    augmentation: float = Field(0.0, ge=0, le=1, description="strength of the task's own augmentation; 0: none")

    def model_post_init(self, context: Any) -> None:
        """Refuse augmentation in a task that has none, rather than train the plain model under its name."""
        super().model_post_init(context)
        if self.augmentation and type(self).augmented is Small.augmented:
            raise ValueError(f"{type(self).__name__} has no augmentation that keeps the label")

    def model(self) -> Any:
        """Return the model of the task, with dropout behind every branch if set."""
        model = self.plain_model()
        if self.residual_dropout:
            for branch in branches(model):
                branch.register_forward_hook(Dropped(self.residual_dropout))
        return model

    def plain_model(self) -> nn.Module:
        """Return the model of the task without any control."""
        raise NotImplementedError(f"{type(self).__name__} has no plain_model")

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations, of the training examples by the first 400."""
        return [Evaluation("train", limit=400)]

    def augmented(self, inputs: Any, generator: torch.Generator) -> Any:
        """Return the inputs of a training batch, randomly changed with strength `augmentation`."""
        return inputs

    def batch(self, examples: Any, generator: torch.Generator | None) -> Batch:
        """Return a batch, in training augmented if set."""
        inputs, targets = examples
        is_changed = generator is not None and self.augmentation
        return Batch(self.augmented(inputs, generator) if is_changed and generator else inputs, targets)


class SmallDigits(Small, digits.Digits):
    """Handwritten digits by a vision transformer of 17 tokens; its augmentation shifts images by up to a pixel."""

    dim: int = 32
    depth: int = 2
    heads: int = 4
    head_dim: int = 8
    mlp_dim: int = 64
    norm: NormPlace = "pre"

    parity: bool = Field(False, description="whether the classes are even and odd, which no mean image tells apart")

    def plain_model(self) -> nn.Module:
        """Return the vision transformer."""
        shape = self.model_dump(include={"dim", "depth", "heads", "head_dim", "mlp_dim", "norm"})
        return VisionTransformer(classes=2 if self.parity else 10, image_size=8, channels=1, patch=2, **shape)

    def data(self, split: str) -> tuple[Tensor, Tensor]:
        """Return images (B, 1, 8, 8) in [-1, 1], and their digits or whether these are odd."""
        images, figures = super().data(split)
        return images, figures % 2 if self.parity else figures

    def all_metrics(self) -> tuple[Metric, ...]:
        """Return the metrics; a diverged run counts as chance."""
        chance = 0.5 if self.parity else 0.1
        return tuple(
            dataclasses.replace(metric, failure=chance) if metric.name == self.metric_name else metric
            for metric in super().all_metrics()
        )

    def augmented(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return images (B, 1, 8, 8), a share `augmentation` of them shifted by at most one pixel each way."""
        count, moves = len(inputs), torch.randint(3, (2, len(inputs)), generator=generator)
        moves = torch.where(torch.rand(count, generator=generator) < self.augmentation, moves, 1)
        padded, at = F.pad(inputs, (1, 1, 1, 1), value=-1.0), torch.arange(8)
        rows = torch.arange(count)[:, None, None]
        return padded[:, 0][rows, (moves[0][:, None] + at)[:, :, None], (moves[1][:, None] + at)[:, None]][:, None]


class Cells(Small, Task):
    """Benign or malignant, from 30 measurements of a cell's nuclei (Wisconsin, 1995): one token for each measurement.

    The model is an encoder over tokens of features, as in Gorishniy et al. 2021 (arXiv 2106.11959). Its augmentation
    adds Gaussian noise to standardised measurements.
    """

    failure: ClassVar[float | None] = 0.627

    dim: int = 32
    depth: int = 2
    heads: int = 4
    mlp_dim: int = 64
    norm: SumNorm = "pre"

    def plain_model(self) -> nn.Module:
        """Return the encoder."""
        return _Measured(30, 2, self.dim, self.depth, self.heads, self.mlp_dim, self.norm)

    def data(self, split: str) -> tuple[Tensor, Tensor]:
        """Return measurements (N, 30), standardised over all cells, and classes."""
        inputs, targets = _cells()
        return inputs[CELLS[split]], targets[CELLS[split]]

    def augmented(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return measurements with noise of the standard deviation `augmentation`."""
        return inputs + self.augmentation * torch.randn(inputs.shape, generator=generator)


class Spelling(Small, Task):
    """Whether an utterance of AN4 begins with a spelled letter or a word, from its first second, by an encoder.

    Its augmentation masks bands of cepstra and stretches of frames, as SpecAugment (Park et al. 2019, arXiv
    1904.08779).
    """

    failure: ClassVar[float | None] = 0.5

    dim: int = 32
    depth: int = 2
    heads: int = 4
    mlp_dim: int = 64
    norm: SumNorm = "post"

    def plain_model(self) -> nn.Module:
        """Return the encoder."""
        return _Heard(an4.CEPSTRA * STRIDE, 2, self.dim, self.depth, self.heads, self.mlp_dim, self.norm)

    def data(self, split: str) -> tuple[Tensor, Tensor]:
        """Return tokens (N, 20, 65) of the first second, and whether a letter comes first.

        The last 150 training utterances, of speakers of their own, are for validation.
        """
        inputs, targets = _utterances(self.folder, "test" if split == "test" else "train")
        part = {"train": slice(0, -150), "validation": slice(-150, None)}.get(split, slice(None))
        return inputs[part], targets[part]

    def augmented(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return tokens with a share 0.3 · `augmentation` of the tokens, and of the cepstra, set to 0."""
        count, tokens, width = inputs.shape
        keep = torch.rand(count, tokens, 1, generator=generator) >= 0.3 * self.augmentation
        bands = torch.rand(count, 1, an4.CEPSTRA, generator=generator) >= 0.3 * self.augmentation
        return inputs * keep * bands.repeat(1, 1, width // an4.CEPSTRA)

    def files(self) -> list[Path]:
        """Return the file of features."""
        return an4.files(self.folder)

    def data_sets(self) -> list[DataSet]:
        """Return the data sets of the task."""
        return [an4.SOURCE.described()]

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Check the file of features."""
        an4.prepare(self.folder, tell)


class Pairs(Small, Task):
    """Recall of the value that followed a key in a list of pairs, by layers of attention alone; data are generated."""

    failure: ClassVar[float | None] = 1 / VALUES

    pairs: int = 4
    asked: int = 4
    dim: int = 32
    depth: int = 2
    heads: int = 2

    def plain_model(self) -> nn.Module:
        """Return layers of attention without MLPs."""
        tokens = 2 * self.pairs + self.asked
        return AttentionAlone(KEYS + VALUES, VALUES, tokens, self.asked, self.dim, self.heads, self.depth)

    def data(self, split: str) -> tuple[Tensor, Tensor]:
        """Return tokens (N, 2 · pairs + asked) and the values (N, asked) of the keys at the end."""
        generator, count = torch.Generator().manual_seed(sorted(SEQUENCES).index(split)), SEQUENCES[split]
        keys = torch.rand(count, KEYS, generator=generator).argsort(1)[:, : self.pairs]
        values = torch.randint(VALUES, (count, self.pairs), generator=generator)
        asked = torch.rand(count, self.pairs, generator=generator).argsort(1)[:, : self.asked]
        listed = torch.stack([keys, values + KEYS], dim=2).flatten(1)
        return torch.cat([listed, keys.gather(1, asked)], dim=1), values.gather(1, asked)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy per asked key, in nats."""
        loss = F.cross_entropy(output.flatten(0, 1), targets.flatten())
        if not self.label_smoothing or not torch.is_grad_enabled():
            return loss
        return (1 - self.label_smoothing) * loss + self.label_smoothing * self.uniform_loss(output, targets)


class _Encoder(nn.Module):
    """Encoder layers over tokens (B, T, D), their mean, and the scores of classes."""

    def __init__(self, classes: int, dim: int, depth: int, heads: int, mlp_dim: int, norm: SumNorm) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(dim, heads, mlp_dim, norm) for _ in range(depth))
        self.norm = nn.LayerNorm(dim) if norm == "pre" else nn.Identity()
        self.head = nn.Linear(dim, classes)

    def classified(self, x: Tensor) -> Tensor:
        nothing = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        for layer in self.layers:
            x = layer(x, nothing)
        return self.head(self.norm(x).mean(1))


class _Measured(_Encoder):
    """An encoder of measurements (B, F): each is a token, its value times a learned direction."""

    def __init__(
        self, features: int, classes: int, dim: int, depth: int, heads: int, mlp_dim: int, norm: SumNorm
    ) -> None:
        super().__init__(classes, dim, depth, heads, mlp_dim, norm)
        self.directions = nn.Parameter(torch.randn(features, dim) / dim**0.5)
        self.names = nn.Parameter(torch.randn(features, dim) / dim**0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.classified(inputs[..., None] * self.directions + self.names)


class _Heard(_Encoder):
    """An encoder of tokens of speech (B, T, F) with sinusoidal positions."""

    def __init__(
        self, features: int, classes: int, dim: int, depth: int, heads: int, mlp_dim: int, norm: SumNorm
    ) -> None:
        super().__init__(classes, dim, depth, heads, mlp_dim, norm)
        self.enter = nn.Linear(features, dim)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.enter(inputs)
        return self.classified(x + sinusoids(x.shape[1], x.shape[2]).to(x))


@lru_cache(maxsize=1)
def _cells() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_breast_cancer

    cells = load_breast_cancer()
    order = torch.randperm(len(cells.target), generator=torch.Generator().manual_seed(0))
    inputs, targets = torch.from_numpy(cells.data)[order], torch.from_numpy(cells.target).long()[order]
    return ((inputs - inputs.mean(0)) / inputs.std(0)).float(), targets


@lru_cache(maxsize=2)
def _utterances(folder: Path | None, split: str) -> tuple[Tensor, Tensor]:
    heard = an4.read(folder, split)
    inputs = torch.zeros(len(heard), FRAMES, an4.CEPSTRA)
    for at, one in enumerate(heard):
        frames = (one.features[:FRAMES] - one.features.mean(0)) / one.features.std(0)
        inputs[at, : len(frames)] = frames
    targets = torch.tensor([int(len(one.transcript.split()[0]) == 1) for one in heard])
    return inputs.view(len(heard), FRAMES // STRIDE, -1), targets
