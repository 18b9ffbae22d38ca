"""Semantic segmentation of street scenes: a Segmenter on CamVid (Brostow et al. 2008) at 240 × 180 pixels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.lab.experiments.evaluation import Sums
from headwise.study import Batch, DataSet, Evaluation, Metric, Task
from headwise_papers.data import camvid
from headwise_papers.tasks.mean_iou import confusion, mean_iou
from headwise_papers.tasks.multi_scale import at_pixels, multi_scale
from headwise_papers.tasks.segmenter import Segmenter

CLASSES, VOID = len(camvid.CLASSES), camvid.VOID
HEIGHT, WIDTH = 180, 240


class StreetScenes(Task):
    """Classification of every pixel of a street scene; unlabelled pixels (void) are ignored."""

    # of the constant answer "road": IoU 0.267 for road, the share of its test pixels, and 0 for ten other classes
    metrics: ClassVar[tuple[Metric, ...]] = (Metric("miou", "mean IoU", unit="%", failure=0.024),)

    steps: int | None = 600
    batch_size: int = 8
    evaluation_batch_size: int = 32
    learning_rate: float = 1e-3
    warmup: float = 20
    schedule: Literal["constant", "cosine", "linear", "inverse_sqrt", "plateau"] = "cosine"
    clip: float | None = 1.0
    head_statistics: tuple[str, ...] = ("stream_cosine", "final_cosine")
    patch: int = 20
    dim: int = 48
    depth: int = 8
    heads: int = 2
    decoder_depth: int = 1
    stride: int = Field(4, ge=1, description="only every n-th row and column of pixels is learned and judged")
    zoom: float = Field(1.0, ge=1, description="training images are enlarged by up to this much before they are cut")
    scales: tuple[float, ...] = (0.75, 1.0, 1.25)
    multi_scale_images: int | None = Field(40, description="test images that are seen at all scales; None: all")

    def model(self) -> nn.Module:
        """Return the Segmenter."""
        return self.segmenter()

    def segmenter(self) -> Segmenter:
        """Return the Segmenter with random weights."""
        shape = self.model_dump(include={"patch", "dim", "depth", "heads", "decoder_depth"})
        return Segmenter(classes=CLASSES, size=(HEIGHT, WIDTH), **shape)

    def data(self, split: str) -> tuple[Tensor, Tensor]:
        """Return images (N, 3, 180, 240) as bytes and the class of each pixel (N, 180, 240); test images are
        shuffled."""
        images, labels = camvid.read(self.folder, split)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        # the files are ordered by drive; shuffled, the first images represent all if fewer are evaluated
        return (images[order], labels[order]) if split == "test" else (images, labels)

    def batch(self, examples: Any, generator: torch.Generator | None) -> Batch:
        """Return images scaled to [-1, 1], in training enlarged, cropped and mirrored at random, and the class of every
        stride-th pixel."""
        images, labels = examples[0].float().div_(127.5).sub_(1.0), examples[1]
        if generator is not None:
            pairs = [self._augmented(*pair, generator) for pair in zip(images, labels, strict=True)]
            images, labels = (torch.stack(parts) for parts in zip(*pairs, strict=True))
        first = self.stride // 2
        return Batch(images, labels[:, first :: self.stride, first :: self.stride].long())

    def _augmented(self, image: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        mirrored, zoom, down, right = torch.rand(4, generator=generator).tolist()
        if self.zoom > 1:
            size = labels.shape
            part = [round(side / (1 + zoom * (self.zoom - 1))) for side in size]
            top, left = (round(at * (side - cut)) for at, side, cut in zip((down, right), size, part, strict=True))
            crop = (slice(top, top + part[0]), slice(left, left + part[1]))
            image = F.interpolate(image[None, :, *crop], size, mode="bilinear")[0]
            labels = F.interpolate(labels[None, None, *crop].float(), size, mode="nearest")[0, 0]
        return (image.flip(2), labels.flip(1)) if mirrored < 0.5 else (image, labels)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of the labelled pixels, in nats."""
        return F.cross_entropy(at_pixels(output, targets.shape[1:]), targets, ignore_index=VOID)

    def weight(self, targets: Tensor) -> Tensor:
        """Return the number of labelled pixels."""
        return (targets != VOID).sum()

    def count(self, output: Tensor, targets: Tensor) -> Sums:
        """Return the numbers of pixels by true and predicted class."""
        return {"confusion": confusion(at_pixels(output, targets.shape[1:]).argmax(1), targets, CLASSES, VOID)}

    def finish(self, sums: dict[str, Tensor]) -> dict[str, Any]:
        """Return the mean IoU."""
        return {"miou": mean_iou(sums["confusion"])}

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations, with the test images at one scale and at several."""
        multi_scale_test = Evaluation("multi-scale", "test", output=self._at_all_scales, limit=self.multi_scale_images)
        return [Evaluation("train", when="never"), Evaluation("validation", when="end"), multi_scale_test]

    def _at_all_scales(self, model: nn.Module, images: Tensor) -> Tensor:
        pixels = [-(-(side - self.stride // 2) // self.stride) for side in images.shape[2:]]
        return multi_scale(model, images, self.scales, self.patch, pixels)

    def files(self) -> list[Path]:
        """Return the files of images and labels."""
        return camvid.files(self.folder)

    def data_sets(self) -> list[DataSet]:
        """Return the data sets of the task."""
        return [camvid.described()]

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Find or download the pictures, and read every one."""
        camvid.prepare(self.folder, tell)
