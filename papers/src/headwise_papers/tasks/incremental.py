"""Incremental learning of CIFAR-100: five tasks of twenty classes, trained one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from headwise.lab.experiments.evaluation import Sums
from headwise.study import Batch, DataSet, Evaluation, Metric, Phase, Task, VisionTransformer
from headwise_papers.data.cifar import SOURCES, described, prepare, read
from headwise_papers.tasks.deit import SIDE, Moves, draw_moves, moved

TASKS, EACH = 5, 20


class Incremental(Task):
    """Five tasks of twenty classes, learned in five phases by one model with twenty outputs per task.

    The task of an image is known in training and evaluation, so the answer is one of its twenty classes. After every
    phase all tasks are evaluated: "after 3/task 1/accuracy" is an entry of the accuracy matrix. The primary metric is
    the mean over tasks after the last phase; forgetting is the mean fall of each earlier task from its best (Chaudhry
    et al. 2018, arXiv 1801.10112).
    """

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("accuracy", "accuracy", unit="%", failure=1 / EACH),
        Metric("forgetting", "forgetting", higher_is_better=False, unit="%"),
    )
    decides_on: ClassVar[str] = "final"

    dim: int = Field(192, ge=1)
    depth: int = Field(12, ge=1)
    heads: int = Field(3, ge=1)
    mlp_dim: int = Field(768, ge=1)
    patch: int = Field(4, ge=1)
    test_each: int | None = Field(
        None, ge=1, description="test images of each task, the same for all runs; None: all 2,000"
    )
    augment: bool = Field(False, description="training images are flipped and moved by up to 4 pixels")

    def model(self) -> VisionTransformer:
        """Return the transformer of the study on CIFAR-10, with a hundred outputs."""
        shape = self.model_dump(include={"dim", "depth", "heads", "mlp_dim", "patch"})
        return VisionTransformer(classes=TASKS * EACH, image_size=32, head_dim=self.dim // self.heads, **shape)

    def phases(self) -> list[Phase]:
        """Return a phase for each task."""
        return [Phase(f"after {task}", data=f"train {task}") for task in range(TASKS)]

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations: each task after every phase, and all tasks at the end."""
        tasks = [Evaluation(f"task {task}", split=f"test {task}", when="phase") for task in range(TASKS)]
        return [
            *tasks,
            Evaluation("final", split="test"),
            *(Evaluation(name, when="never") for name in ("train", "test")),
        ]

    def data(self, split: str) -> tuple[Tensor, Tensor] | None:
        """Return images (B, 3, 32, 32) as bytes and the indices (B,) of their outputs.

        A split is of all tasks ("test") or of one ("test 3").
        """
        if split == "validation":
            return None
        part, _, task = split.partition(" ")
        images, classes = read(SOURCES["cifar100"], part, self.folder)
        places = _order()[classes]
        # the images of CIFAR's files are in random order of their classes
        most = self.test_each if part == "test" else None
        tasks = [int(task)] if task else range(TASKS)
        chosen = torch.cat([(places // EACH == one).nonzero()[:most, 0] for one in tasks])
        return images[chosen], places[chosen]

    def draw(self, count: int, generator: torch.Generator) -> Moves | None:
        """Return how `count` training images are flipped and shifted, with `augment`."""
        return draw_moves(count, SIDE, generator) if self.augment else None

    def batch(self, examples: Any, drawn: Moves | None) -> Batch:
        """Return images scaled to [-1, 1]; in training with `augment`, flipped and shifted at random."""
        images, places = examples
        images = images.float().div_(127.5).sub_(1.0)
        return Batch(images if drawn is None else moved(images, drawn), places)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy in nats over the classes of each image's own task."""
        return F.cross_entropy(_of_own_task(output, targets), targets % EACH)

    def count(self, output: Tensor, targets: Tensor) -> Sums:
        """Return the numbers of images and of correct answers within their task, and the summed loss in nats."""
        own, targets_in_task = _of_own_task(output, targets), targets % EACH
        loss = F.cross_entropy(own, targets_in_task, reduction="sum")
        return {
            "weight": torch.tensor(len(targets)),
            "loss": loss,
            "accuracy": (own.argmax(-1) == targets_in_task).sum(),
        }

    def summary(self, outcomes: dict[str, float]) -> dict[str, float]:
        """Return forgetting: the mean fall of each task but the last from its best after an earlier phase."""
        last = TASKS - 1
        falls = [
            max(outcomes[_entry(phase, task)] for phase in range(task, last)) - outcomes[_entry(last, task)]
            for task in range(last)
        ]
        return {"final/forgetting": sum(falls) / len(falls)}

    def data_sets(self) -> list[DataSet]:
        """Return the data sets of the task."""
        return [described(SOURCES["cifar100"])]

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Download missing files, and check every file against the official MD5."""
        prepare(SOURCES["cifar100"], self.folder, tell)


def _entry(phase: int, task: int) -> str:
    return f"after {phase}/task {task}/accuracy"


def _order() -> Tensor:
    """Return the output of each class, in random order, because the classes' own order is alphabetical."""
    return torch.randperm(TASKS * EACH, generator=torch.Generator().manual_seed(0))


def _of_own_task(output: Tensor, places: Tensor) -> Tensor:
    """Return the twenty outputs (B, 20) of each image's task from all outputs (B, 100)."""
    return output.view(-1, TASKS, EACH)[torch.arange(len(output), device=output.device), places // EACH]
