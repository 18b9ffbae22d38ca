"""SimCLR on CIFAR-10: contrastive training on two views of each image, then a linear probe of the frozen encoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from headwise.lab.experiments.evaluation import Sums
from headwise.study import Batch, DataSet, Evaluation, Metric, Phase, Task, VisionTransformer
from headwise_papers.data.cifar import SOURCES, described, files, prepare, read
from headwise_papers.tasks.image_views import View, draw_views, view
from headwise_papers.tasks.nt_xent import found, nt_xent

SOURCE = SOURCES["cifar10"]
# training images that are evaluated at the end: enough for a mean
READ_AGAIN = 1000


class Contrast(Task):
    """Contrastive learning from pairs of views without labels, then classification by a linear probe."""

    metrics = (Metric("accuracy", unit="%", failure=0.1),)

    stage: Literal["contrast", "probe"] = "contrast"
    dim: int = 64
    depth: int = 6
    heads: int = 4
    mlp_dim: int = 128
    patch: int = 8
    norm: Literal["pre", "none"] = "pre"
    frozen_patch: bool = Field(False, description="whether the patch embedding stays as it was drawn")
    projection: int = Field(64, ge=1, description="outputs of the projector, an MLP as wide as the model")
    temperature: float = Field(0.5, gt=0)
    least_area: float = Field(0.2, gt=0, le=1, description="of an image, for a crop")
    colour: float = Field(0.5, ge=0, le=1, description="strength of the change of colours")
    grey: float = Field(0.2, ge=0, le=1, description="share of views without colour")
    probe_epochs: int = Field(5, ge=1)
    probe_learning_rate: float = Field(1e-2, gt=0)

    def files(self) -> list[Path]:
        """Return the files of CIFAR-10."""
        return files(SOURCE, self.folder)

    def data_sets(self) -> list[DataSet]:
        """Return the data sets of the task."""
        return [described(SOURCE)]

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Download missing files, and check every file against the official MD5."""
        prepare(SOURCE, self.folder, tell)

    def model(self) -> ContrastModel:
        """Return the encoder with a projector, or for the probe with a linear layer."""
        shape = self.model_dump(include={"dim", "depth", "heads", "mlp_dim", "patch", "norm"})
        head = nn.Linear(self.dim, SOURCE.classes) if self.stage == "probe" else projector(self.dim, self.projection)
        return ContrastModel(
            VisionTransformer(classes=1, image_size=32, head_dim=self.dim // self.heads, **shape),
            head,
            self.frozen_patch,
        )

    def data(self, split: str) -> tuple[Tensor, Tensor] | None:
        """Return images (B, 3, 32, 32) as bytes, and classes; there is no validation split."""
        if split == "validation":
            return None
        return read(SOURCE, split, self.folder)

    def draw(self, count: int, generator: torch.Generator) -> View | None:
        """Return the draws of two views of `count` images; the probe has none."""
        settings = self.model_dump(include={"least_area", "colour", "grey"})
        return None if self.stage == "probe" else draw_views(count, generator, views=2, **settings)

    def batch(self, examples: tuple[Tensor, Tensor], drawn: View | None) -> Batch:
        """Return two views of each image, or for the probe the image itself, in [-1, 1]."""
        images, labels = examples[0].float() / 255, examples[1]
        if drawn is None:
            # evaluation uses random views too, the same in every pass
            drawn = self.draw(len(labels), torch.Generator().manual_seed(0))
        if drawn is None:
            return Batch((2 * images - 1,), labels)
        return Batch((2 * view(images.repeat(2, 1, 1, 1), drawn) - 1).chunk(2), labels)

    def loss(self, output: Any, targets: Tensor) -> Tensor:
        """Return NT-Xent of two views, or the probe's cross entropy, in nats."""
        if self.stage == "probe":
            return nn.functional.cross_entropy(output, targets)
        one, other = output
        return nt_xent(one, other, self.temperature)

    def count(self, output: Any, targets: Tensor) -> Sums:
        """Return the numbers of examples and of correct classes or matched views, and the summed loss."""
        right = (output.argmax(-1) == targets).float().mean() if self.stage == "probe" else found(*output)
        weight = torch.tensor(float(len(targets)))
        return {"weight": weight, "loss": self.loss(output, targets) * weight, "accuracy": right * weight}

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations: part of the training split, and the matching of views before the probe."""
        return [Evaluation("train", limit=READ_AGAIN), Evaluation("views", "test", when="phase", limit=READ_AGAIN)]

    def phases(self) -> list[Phase]:
        """Return two phases: contrast, then a linear probe of the frozen encoder, trained by Adam."""
        probe = {
            "stage": "probe",
            "epochs": self.probe_epochs,
            "steps": None,
            "learning_rate": self.probe_learning_rate,
            "optimizer": "adam",
            "momentum": None,
            "nesterov": None,
            "trust": None,
            "schedule": "cosine",
            "final_learning_rate": None,
            "warmup": 0,
            "weight_decay": 0.0,
        }
        probe_phase = Phase("probe", changes=probe, methods=False, carry=("encoder.*",), learn=("head.*",))
        return [Phase("contrast"), probe_phase]


class ContrastModel(nn.Module):
    """A model that encodes views by a vision transformer's class token and applies a head: one tensor per view."""

    def __init__(self, encoder: VisionTransformer, head: nn.Module, frozen_patch: bool) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head
        # the encoder's own classifier is not used
        encoder.add_module("head", nn.Identity())
        encoder.patch.requires_grad_(not frozen_patch)

    def forward(self, *views: Tensor) -> Tensor | tuple[Tensor, ...]:
        outputs = self.head(self.encoder(torch.cat(views))).chunk(len(views))
        return outputs if len(views) > 1 else outputs[0]


def projector(dim: int, outputs: int) -> nn.Sequential:
    """Return the MLP between encoder and loss, which the probe omits."""
    return nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, outputs))
