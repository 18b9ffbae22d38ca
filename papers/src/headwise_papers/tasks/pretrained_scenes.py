"""Street scenes for an encoder that has learned to classify CIFAR-100's images before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.lab.experiments.evaluation import Sums
from headwise.study import Batch, DataSet, Phase
from headwise_papers.data import cifar
from headwise_papers.tasks.image_views import flip
from headwise_papers.tasks.segmenter import Encoder
from headwise_papers.tasks.street_scenes import StreetScenes

SOURCE = cifar.SOURCES["cifar100"]


class PretrainedScenes(StreetScenes):
    """Classification of CIFAR-100's enlarged images, then of the pixels of street scenes.

    The encoder and its methods are in both phases. Its head for images is dropped, and the decoder starts at random.
    """

    stage: Literal["pretrain", "segment"] = "segment"
    hand_over: bool = Field(True, description="whether the Segmenter has the pretrained encoder, or a random one")
    pretrain_steps: int = Field(1000, ge=1)
    pretrain_batch_size: int = Field(64, ge=1)
    pretrain_learning_rate: float = Field(1e-3, gt=0)
    pretrain_side: int = Field(80, ge=1, description="rows and columns to which CIFAR's 32 are enlarged")

    def phases(self) -> list[Phase]:
        """Return two phases: pretraining, then street scenes with the weights of the encoder, or with random ones."""
        changes = {
            "stage": "pretrain",
            "steps": self.pretrain_steps,
            "batch_size": self.pretrain_batch_size,
            "learning_rate": self.pretrain_learning_rate,
        }
        segment = Phase("segment", start="previous" if self.hand_over else "fresh", carry=("encoder.*",))
        return [Phase("pretrain", data="pretrain", changes=changes), segment]

    def model(self) -> nn.Module:
        """Return the Segmenter, or while pretraining its encoder with a linear layer for images."""
        segmenter = self.segmenter()
        return segmenter if self.stage == "segment" else ImageClassifier(segmenter.encoder, self.dim, SOURCE.classes)

    def data(self, split: str) -> tuple[Tensor, Tensor]:
        """Return the examples of a split; those of "pretrain" are images (N, 3, 32, 32) as bytes and classes (N,)."""
        return cifar.read(SOURCE, "train", self.folder) if split == "pretrain" else super().data(split)

    def draw(self, count: int, generator: torch.Generator) -> Any:
        """Return the generator for street scenes, or while pretraining which of `count` images are mirrored."""
        return generator if self.stage == "segment" else torch.rand(count, generator=generator) < 0.5

    def batch(self, examples: Any, drawn: Any) -> Batch:
        """Return the street scenes' batch, or while pretraining enlarged images in [-1, 1], mirrored at random."""
        if self.stage == "segment":
            return super().batch(examples, drawn)
        images, classes = examples[0].float().div_(127.5).sub_(1.0), examples[1]
        if drawn is not None:
            images = flip(images, drawn)
        return Batch(F.interpolate(images, (self.pretrain_side,) * 2, mode="bilinear"), classes)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of labelled pixels, or while pretraining of images, in nats."""
        return super().loss(output, targets) if self.stage == "segment" else F.cross_entropy(output, targets)

    def weight(self, targets: Tensor) -> Tensor:
        """Return the number of labelled pixels, or while pretraining of images."""
        return super().weight(targets) if self.stage == "segment" else _number(targets)

    def count(self, output: Tensor, targets: Tensor) -> Sums:
        """Return the numbers of pixels by true and predicted class, or while pretraining the number of images."""
        if self.stage == "segment":
            return super().count(output, targets)
        return {"weight": _number(targets)}

    def finish(self, sums: dict[str, Tensor]) -> dict[str, Any]:
        """Return the mean IoU, or nothing while pretraining, which is not evaluated."""
        return super().finish(sums) if self.stage == "segment" else {}

    def files(self) -> list[Path]:
        """Return the files of street scenes and of CIFAR-100."""
        return [*super().files(), *cifar.files(SOURCE, self.folder)]

    def data_sets(self) -> list[DataSet]:
        """Return the data sets of the task."""
        return [*super().data_sets(), cifar.described(SOURCE)]

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Find or download both data sets, and check every file."""
        super().prepare(tell)
        cifar.prepare(SOURCE, self.folder, tell)


def _number(targets: Tensor) -> Tensor:
    return torch.tensor(len(targets), device=targets.device)


class ImageClassifier(nn.Module):
    """The logits of images (B, classes) by a linear layer over the mean of an encoder's tokens (B, N, dim)."""

    def __init__(self, encoder: Encoder, dim: int, classes: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(images).mean(1))
        return logits
