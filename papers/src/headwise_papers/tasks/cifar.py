"""Classification of CIFAR's images with a vision transformer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from headwise.lab.studies.vision_transformer import NormPlace
from headwise.study import DataSet, Metric, Task, VisionTransformer
from headwise_papers.data.cifar import SOURCES, described, prepare, read


class Cifar(Task):
    """Classification of CIFAR's images with the blog's vision transformer."""

    test_curve: ClassVar[bool] = True

    name: Literal["cifar10", "cifar100"]
    epochs: int = Field(25, ge=1)
    dim: int = 128
    depth: int = 6
    heads: int = 5
    head_dim: int = 64
    mlp_dim: int = 128
    patch: int = 4
    norm: NormPlace = "pre"

    def all_metrics(self) -> tuple[Metric, ...]:
        """Return accuracy and loss; a diverged run counts as chance for the number of classes."""
        chance = 1 / SOURCES[self.name].classes
        return tuple(
            dataclasses.replace(metric, failure=chance) if metric.name == self.metric_name else metric
            for metric in super().all_metrics()
        )

    def model(self) -> VisionTransformer:
        """Return the blog's ViT."""
        shape = self.model_dump(include={"dim", "depth", "heads", "head_dim", "mlp_dim", "patch", "norm"})
        return VisionTransformer(classes=SOURCES[self.name].classes, image_size=32, **shape)

    def data(self, split: str) -> tuple[Tensor, Tensor] | None:
        """Return images (B, 3, 32, 32) as bytes, and classes; there is no validation split."""
        if split == "validation":
            return None
        return read(SOURCES[self.name], split, self.folder)

    def transform(self, inputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return images scaled to [-1, 1]."""
        return inputs.float().div_(127.5).sub_(1.0)

    def data_sets(self) -> list[DataSet]:
        """Return the data sets of the task."""
        return [described(SOURCES[self.name])]

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Download missing files, and check every file against the official MD5."""
        prepare(SOURCES[self.name], self.folder, tell)
