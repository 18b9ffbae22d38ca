"""Tasks that do what a user may well do and a core easily overlooks: write in place, judge on data of another form,
count nothing."""

from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from headwise.study import Batch, Evaluation, Metric, Phase, Task, VisionTransformer


class Images(Task):
    """Classify 4×4 images."""

    epochs: int = 1
    batch_size: int = 16
    start: Path = Path()

    def model(self):
        return VisionTransformer(
            classes=2, image_size=4, channels=1, patch=2, dim=8, depth=1, heads=2, head_dim=4, mlp_dim=8
        )

    def data(self, split):
        images = torch.randn(40, 1, 4, 4, generator=torch.Generator().manual_seed(len(split)))
        return images, (images.mean((1, 2, 3)) > 0).long()


class Copied(Images):
    """Scale the images of a batch."""

    def batch(self, examples, generator):
        return Batch(0.5 * examples[0] + 1, examples[1])


class InPlace(Images):
    """Scale them where they lie, as collators that mask words do."""

    def batch(self, examples, generator):
        return Batch(examples[0].mul_(0.5).add_(1), examples[1])


class Pair(NamedTuple):
    """Name the parts of examples."""

    image: Tensor
    label: Tensor


class Paired(Images):
    """Return examples as a named tuple."""

    def data(self, split):
        return Pair(*super().data(split))

    def batch(self, examples, generator):
        return Batch(examples.image, examples.label)


class JudgedOtherwise(Images):
    """Train on two views, and be judged on labelled images that only the evaluation's own batch() can read."""

    shows_maps: ClassVar[bool] = True
    head_statistics: tuple[str, ...] = ("attention_entropy",)

    def data(self, split):
        images, labels = super().data(split)
        if split == "test":
            return {"image": images, "label": labels}
        return {"views": torch.stack([images, images], 1), "digit": labels}

    def batch(self, examples, generator):
        return Batch(examples["views"][:, 0], examples["digit"])

    def evaluations(self):
        return [Evaluation("test", batch=lambda examples, generator: Batch(examples["image"], examples["label"]))]


class UndefinedBetween(Images):
    """Leave a metric of the first phase undefined, for all examples though not for a few."""

    metrics = (Metric("accuracy"), Metric("odd"))
    stage: int = 1

    def phases(self):
        return [Phase("one"), Phase("two", changes={"stage": 2})]

    def evaluations(self):
        return [Evaluation("test", when="phase")]

    def count(self, output, targets):
        return {"right": (output.argmax(1) == targets).sum(), "all": torch.tensor(len(targets))}

    def finish(self, sums):
        undefined = self.stage == 1 and sums["all"] > 20
        return {"accuracy": sums["right"] / sums["all"], "odd": float("nan") if undefined else 1.0}


class UndefinedSummary(Images):
    """Derive a figure that is no number."""

    def summary(self, outcomes):
        return {"all/accuracy": float("nan")}


class Explained(Images):
    """Count a share of the variance, which no single batch has, without a list of metrics."""

    metric_name: ClassVar[str] = "explained"

    def loss(self, output, targets):
        return (output[:, 0] - targets).square().mean()

    def count(self, output, targets):
        return {
            "missed": (output[:, 0] - targets).square().sum(),
            "squares": targets.square().sum(),
            "total": targets.sum(),
            "all": torch.tensor(len(targets)),
        }

    def finish(self, sums):
        return {"explained": 1 - sums["missed"] / (sums["squares"] - sums["total"] ** 2 / sums["all"])}


class InOrder(Images):
    """Train on two tasks in an order that is a setting."""

    order: str = "ab"

    def phases(self):
        return [Phase(f"on {letter}", data=f"train {letter}") for letter in self.order]


class Started(Images):
    """Start from a folder that is a setting, and read two files of one name."""

    def phases(self):
        return [Phase("one", start=self.start)]


class TwoOfOneName(Images):
    """Read two files of one name."""

    def files(self):
        return [self.start / "a" / "words.txt", self.start / "b" / "words.txt"]


class Bounded(Images):
    """Bear 64 tokens in a batch and not one more."""

    tokens_per_batch: int | None = 64
    head_statistics: tuple[str, ...] = ("attention_entropy",)

    def data(self, split):
        images, labels = super().data(split)
        return {"images": images, "labels": labels, "tokens": torch.arange(3, 43).clamp(max=32).flip(0)}

    def lengths(self, examples):
        return examples["tokens"]

    def batch(self, examples, generator):
        assert len(examples["tokens"]) * examples["tokens"].max() <= 64, "more than 64 tokens"
        return Batch(examples["images"], examples["labels"])


class Faulty(Images):
    """Return no model, or a loss that nothing is learned from."""

    fault: str = ""

    def model(self):
        wrong = {
            "no module": lambda: lambda images: images,
            "nothing": lambda: None,
            "raises": lambda: 1 / 0,
            "no parameters": nn.Flatten,
        }
        return wrong.get(self.fault, super().model)()

    def loss(self, output, targets):
        found = super().loss(output, targets)
        return found.detach() if self.fault == "detached" else found * float("nan") if self.fault == "nan" else found


class Reader(nn.Module):
    """Read words in two steps, and keep a buffer as batch norms do."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(8, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mask", torch.ones(3, 2).t() > 0)

    def encode(self, words):
        return self.layers(self.embed(words)).mean(1)

    def forward(self, words):
        if self.training:
            self.seen += len(words)
        return self.head(self.encode(words)) * (1 + 0.1 * self.seen)


class Lone(Task):
    """Train on single sentences; be judged by parts of the model, and on one example that only one process gets."""

    steps: int | None = 6
    batch_size: int = 1
    accumulation: int = 2
    optimizer: str = "sgd"
    learning_rate: float = 0.1
    clip: float | None = 0.5
    evaluation_batch_size: int = 5

    def model(self):
        return Reader()

    def data(self, split):
        words = torch.randint(16, (1 if split == "one" else 41, 6), generator=torch.Generator().manual_seed(len(split)))
        return words, (words[:, 0] > 7).long()

    def evaluations(self):
        return [
            Evaluation("one"),
            Evaluation("parts", "test", output=lambda model, words: model.head(model.encode(words))),
        ]
