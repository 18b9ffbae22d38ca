"""A task with settings of unusual kinds, whose `fault` says what it tells wrongly of itself."""

from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.study import Batch, Evaluation, Metric, Phase, Task, VisionTransformer


class Colour(Enum):
    """Name a colour."""

    red = "red"
    blue = "light blue"


class Unusual(Task):
    """Classify 4×4 images; the settings are of every kind that a field may have."""

    epochs: int = 1
    batch_size: int = 16
    fault: str = ""
    fog: float = 0.1
    folder_of_words: Path = Path("words")
    colour: Colour = Colour.red
    word: str = "a"
    several: frozenset[int] = frozenset({1})
    pairs: tuple[tuple[int | None, str], ...] = ()
    table: dict[str, Path] = {}
    anything: Any = None
    between: tuple[float, float] = (0.0, 1.0)

    def model(self):
        return VisionTransformer(
            classes=2, image_size=4, channels=1, patch=2, dim=8, depth=1, heads=2, head_dim=4, mlp_dim=8
        )

    def data(self, split):
        images = torch.randn(40, 1, 4, 4, generator=torch.Generator().manual_seed(len(split)))
        labels = (images.mean((1, 2, 3)) > 0).long()
        images[0, 0, 0, 0] = float("nan") if self.fault == "missing value" else 0.0
        return (images + self.fog * (split == "fog"), labels) if split == "fog" else (images, labels)

    def evaluations(self):
        wrong = {
            "when": lambda: Evaluation("more", "test", when="phases"),
            "limit": lambda: Evaluation("more", "test", limit=-1),
            "no name": lambda: Evaluation("", "test"),
            "name of the core": lambda: Evaluation("gap", "test"),
            "no evaluation": lambda: "more",
            "raises": lambda: Evaluation(1 / 0),
        }
        return [Evaluation("fog"), *([wrong[self.fault]()] if self.fault in wrong else [])]


class Slashed(Unusual):
    """Name a metric by what reads as a part of an evaluation's name."""

    metrics = (Metric("top/1"),)


class Worded(Unusual):
    """Return words where metrics should be."""

    metrics = ("accuracy",)


class Single(Unusual):
    """Return one metric where several should be."""

    metrics = Metric("accuracy")


class LongAtLast(Unusual):
    """Hold one test example that is longer than a batch may be, after those that are tried first."""

    tokens_per_batch: int | None = 64

    def data(self, split):
        images, labels = super().data(split)
        lengths = torch.full((40,), 4)
        lengths[-1] = 100 if split == "test" else 4
        return {"images": images, "labels": labels, "lengths": lengths}

    def lengths(self, examples):
        return examples["lengths"]

    def batch(self, examples, generator):
        return Batch(examples["images"], examples["labels"])


class Named(Unusual):
    """Return a dict, and augment the inputs alone."""

    def data(self, split):
        images, labels = super().data(split)
        return {"images": images, "labels": labels}

    def transform(self, inputs, generator):
        assert set(inputs) == {"images"}
        return (inputs["images"],)


class Unjudged(Named):
    """Let the model give its own loss, and give no targets."""

    def batch(self, examples, generator):
        return Batch((examples["images"],))

    def loss(self, output, targets):
        return nn.functional.cross_entropy(output, torch.zeros(len(output), dtype=torch.long))


class Halved(Unusual):
    """Train a phase in full and one in half precision; an arm turns both."""

    def phases(self):
        other = "bfloat16" if self.dtype == "float32" else "float32"
        return [Phase("one"), Phase("other", changes={"dtype": other})]
