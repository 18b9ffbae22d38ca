"""CIFAR-10 with a DeiT-like transformer, evaluated on corrupted test images."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Literal, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from headwise.lab.experiments.evaluation import Sums
from headwise.study import DataSet, Evaluation, Metric
from headwise_papers.data import frost
from headwise_papers.data.corruptions.table import CORRUPTIONS, SEVERITIES, corrupt
from headwise_papers.tasks.cifar import Cifar

# The plain model's error on each corruption, which scales the mean corruption error (mCE) of every arm and seed, as
# AlexNet's errors do for ImageNet-C: means over seeds 1000 and 1001 of the search, 300 steps.
REFERENCE: dict[str, float] = {
    "gaussian_noise": 0.627,
    "shot_noise": 0.628,
    "impulse_noise": 0.618,
    "defocus_blur": 0.642,
    "glass_blur": 0.65,
    "motion_blur": 0.642,
    "zoom_blur": 0.653,
    "snow": 0.662,
    "frost": 0.787,
    "fog": 0.693,
    "brightness": 0.687,
    "contrast": 0.748,
    "elastic_transform": 0.625,
    "pixelate": 0.637,
    "jpeg_compression": 0.63,
}


class CorruptedCifar(Cifar):
    """Classification of CIFAR-10; outcomes "corrupted/..." are of test images under CIFAR-10-C's fifteen corruptions.

    Each corruption's error is the mean over its five severities, `error` the mean over the corruptions, and `mce` the
    mean of these errors over the reference's (Hendrycks & Dietterich 2019, arXiv 1903.12261, equation 1).
    """

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("error", "error", higher_is_better=False, unit="%", failure=0.9),
        Metric("mce", "mean corruption error relative to the plain model's", higher_is_better=False, unit="%"),
        *(Metric(name, f"error under {name}", higher_is_better=False, unit="%", failure=0.9) for name in CORRUPTIONS),
        *(
            Metric(f"severity {severity}", f"error at severity {severity}", False, "%", failure=0.9)
            for severity in SEVERITIES
        ),
    )
    decides_on: ClassVar[str] = "corrupted"

    name: Literal["cifar10", "cifar100"] = "cifar10"
    images_each: int = Field(
        500, ge=1, le=10_000, description="test images under each corruption and severity, the first ones"
    )
    clean_images: int = Field(2000, ge=1, le=10_000, description="test images without corruption, the first ones")
    corruption_seed: int = Field(0, ge=0, description="of the corruptions' draws, the same for all runs")

    def all_metrics(self) -> tuple[Metric, ...]:
        """Return the error, the mean corruption error, and the error by corruption and by severity."""
        return (*self.metrics, Metric("loss", higher_is_better=False, unit="nats"))

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations on clean and corrupted images, without the training split."""
        corrupted = Evaluation("corrupted", count=self.count_corrupted, finish=self.finish_corrupted)
        return [Evaluation("train", when="never"), Evaluation("test", limit=self.clean_images), corrupted]

    def data(self, split: str) -> tuple[Tensor, Tensor] | None:
        """Return images (B, 3, 32, 32) as bytes, and classes; for "corrupted", class and corruption (B, 2)."""
        if split != "corrupted":
            return super().data(split)
        _, classes = cast(tuple[Tensor, Tensor], super().data("test"))
        many = len(CORRUPTIONS) * len(SEVERITIES)
        kinds = torch.arange(many).repeat_interleave(self.images_each)
        targets = torch.stack([classes[: self.images_each].repeat(many), kinds], dim=1)
        return corrupted_images(self.name, self.folder, self.images_each, self.corruption_seed), targets

    def count(self, output: Tensor, targets: Tensor) -> Sums:
        """Return the numbers of images and errors, and the summed loss in nats."""
        wrong = (output.argmax(-1) != targets).sum()
        loss = torch.nn.functional.cross_entropy(output, targets, reduction="sum")
        return {"weight": torch.tensor(len(targets)), "error": wrong, "loss": loss}

    def count_corrupted(self, output: Tensor, targets: Tensor) -> Sums:
        """Return the numbers of images and errors by corruption and severity."""
        classes, kinds = targets.unbind(1)
        many = len(CORRUPTIONS) * len(SEVERITIES)
        wrong = kinds[output.argmax(-1) != classes]
        return {"wrong": wrong.bincount(minlength=many), "images": kinds.bincount(minlength=many)}

    def finish_corrupted(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the errors from the counts."""
        errors = (sums["wrong"] / sums["images"]).double().view(len(CORRUPTIONS), len(SEVERITIES))
        by_corruption, by_severity = errors.mean(1), errors.mean(0)
        reference = torch.tensor([REFERENCE[name] for name in CORRUPTIONS], dtype=torch.float64, device=errors.device)
        named = dict(zip(CORRUPTIONS, by_corruption, strict=True))
        named |= {f"severity {severity}": error for severity, error in zip(SEVERITIES, by_severity, strict=True)}
        return {"error": errors.mean(), "mce": (by_corruption / reference).mean(), **named}

    def data_sets(self) -> list[DataSet]:
        """Return the data sets of the task."""
        return [*super().data_sets(), frost.SOURCE.described()]

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Download missing files of CIFAR-10 and photographs of frost, and check them."""
        super().prepare(tell)
        frost.prepare(self.folder, tell)


@functools.lru_cache(maxsize=1)
def corrupted_images(name: str, folder: Path | None, count: int, seed: int) -> Tensor:
    """Return the first `count` test images under each corruption and severity, (75·count, 3, 32, 32).

    They are computed once per process.
    """
    images, _ = cast(tuple[Tensor, Tensor], Cifar(name=name).located(folder).data("test"))
    pixels, photographs = images[:count].permute(0, 2, 3, 1).numpy(), frost.read(folder)
    corrupted = [
        corrupt(pixels, corruption, severity, seed=seed, photographs=photographs)
        for corruption in CORRUPTIONS
        for severity in SEVERITIES
    ]
    return torch.from_numpy(np.concatenate(corrupted)).permute(0, 3, 1, 2).contiguous()
