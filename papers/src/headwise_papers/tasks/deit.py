"""CIFAR-10 with NeuTRENO's model, a DeiT-like transformer (Touvron et al. 2021, arXiv 2012.12877)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from headwise.lab.experiments.evaluation import Sums
from headwise.study import Batch, DataSet, Evaluation, Metric, Phase, Task, VisionTransformer
from headwise_papers.data.cifar import SOURCES, described, prepare, read
from headwise_papers.tasks.top_k import in_top

# pixels of an image's side
SIDE = 32
# largest shift of a crop in pixels, as is usual for CIFAR
SHIFT = 4

# settings that two cores train in a quarter of a minute
SMALL: dict[str, Any] = {
    "dim": 48,
    "mlp_dim": 96,
    "patch": 8,
    "steps": 200,
    "batch_size": 32,
    "learning_rate": 2e-3,
    "schedule": "cosine",
    "warmup": 0.1,
    "test_size": 2000,
}
# DeiT-tiny's shape and recipe, without its RandAugment, mixing, erasing and stochastic depth for ImageNet
PUBLISHED: dict[str, Any] = {
    "dim": 192,
    "mlp_dim": 768,
    "patch": 4,
    "steps": None,
    "epochs": 300,
    "batch_size": 1024,
    "learning_rate": 1e-3,
    "final_learning_rate": 1e-5,
    # 5 of 300 epochs
    "warmup": 1 / 60,
    "weight_decay": 0.05,
    "label_smoothing": 0.1,
    "augment": True,
    "dtype": "bfloat16",
    "test_size": None,
}


class DeiT(Task):
    """Classification of CIFAR-10 with a DeiT-like transformer: pre-norm, a class token, learned positions.

    With `adapt`, a plain model is trained first; a second phase, a third as long and with its own learning rate, then
    adapts it, and the arm's methods act in that phase only.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("accuracy", "top-1 accuracy", unit="%", failure=0.1),
        Metric("top5", "top-5 accuracy", unit="%", failure=0.5),
    )

    shows_maps: ClassVar[bool] = True

    dim: int = Field(192, ge=1)
    depth: int = Field(12, ge=1)
    heads: int = Field(3, ge=1)
    mlp_dim: int = Field(768, ge=1)
    patch: int = Field(4, ge=1)
    augment: bool = Field(False, description="training images are flipped and moved by up to 4 pixels")
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    adapt: bool = Field(False, description="a second phase, a third as long, in which alone the arm's methods act")
    adapt_learning_rate: float = Field(1e-3, gt=0)

    def model(self) -> VisionTransformer:
        """Return the transformer."""
        shape = self.model_dump(include={"dim", "depth", "heads", "mlp_dim", "patch"})
        return VisionTransformer(classes=10, image_size=SIDE, head_dim=self.dim // self.heads, **shape)

    def phases(self) -> list[Phase]:
        """Return the single phase, or with `adapt` the training of a plain model and its adaptation."""
        if not self.adapt:
            return [Phase("train")]
        length = {"epochs": max(1, self.epochs // 3)} if self.steps is None else {"steps": max(1, self.steps // 3)}
        changes = {**length, "learning_rate": self.adapt_learning_rate}
        return [Phase("train", methods=False), Phase("adapt", changes=changes)]

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations without the training split, which would cost more than a small study's training."""
        return [Evaluation("train", when="never")]

    def data(self, split: str) -> tuple[Tensor, Tensor] | None:
        """Return images (B, 3, 32, 32) as bytes, and classes; there is no validation split."""
        if split == "validation":
            return None
        return read(SOURCES["cifar10"], split, self.folder)

    def draw(self, count: int, generator: torch.Generator) -> Moves | None:
        """Return how `count` training images are flipped and shifted, with `augment`."""
        return draw_moves(count, SIDE, generator) if self.augment else None

    def batch(self, examples: Any, drawn: Moves | None) -> Batch:
        """Return images scaled to [-1, 1]; in training with `augment`, flipped and shifted at random."""
        images, classes = examples
        images = images.float().div_(127.5).sub_(1.0)
        return Batch(images if drawn is None else moved(images, drawn), classes)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy in nats, with label smoothing if set."""
        return F.cross_entropy(output, targets, label_smoothing=self.label_smoothing)

    def count(self, output: Tensor, targets: Tensor) -> Sums:
        """Return the numbers of images and of top-1 and top-5 hits, and the summed loss in nats."""
        right = {"accuracy": in_top(output, targets, 1).sum(), "top5": in_top(output, targets, 5).sum()}
        return {
            "weight": torch.tensor(len(targets)),
            "loss": F.cross_entropy(output, targets, reduction="sum"),
            **right,
        }

    def data_sets(self) -> list[DataSet]:
        """Return the data sets of the task."""
        return [described(SOURCES["cifar10"])]

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Download missing files, and check every file against the official MD5."""
        prepare(SOURCES["cifar10"], self.folder, tell)


class Moves(NamedTuple):
    """The rows and the columns (B, S) of padded images that moved ones show."""

    rows: Tensor
    columns: Tensor


def draw_moves(count: int, size: int, generator: torch.Generator) -> Moves:
    """Return random moves of images (count, C, size, size): half are flipped, all shifted by up to 4 pixels."""
    flips = torch.rand(count, 1, generator=generator) < 0.5
    down, right = torch.randint(2 * SHIFT + 1, (2, count, 1), generator=generator)
    positions = torch.arange(size)
    return Moves(down + positions, right + torch.where(flips, size - 1 - positions, positions))


def moved(images: Tensor, moves: Moves) -> Tensor:
    """Return images (B, C, S, S), flipped and shifted; new pixels are -1, black."""
    rows, columns = (part.to(images.device) for part in moves)
    padded = F.pad(images, (SHIFT,) * 4, value=-1.0)
    samples = torch.arange(len(images), device=images.device)[:, None, None]
    return padded.movedim(1, -1)[samples, rows[:, :, None], columns[:, None]].movedim(-1, 1).contiguous()
