"""The blog's task: CIFAR's images, the blog's block, and whether runs memorise the training images."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import nn

from headwise.lab.studies.vision_transformer import NormPlace
from headwise.lab.training.batches import run_model
from headwise.study import Evaluation, Metric, Scale
from headwise_papers.tasks.cifar import Cifar

# training accuracy from which a model counts as having memorised the images
MEMORISED = 0.99
# evaluation of the training images with methods active, as in the blog's curves; the first part of its outcomes' names
ACTING = "train with methods"
# the blog's published settings
PAPER: dict[str, Any] = {
    "epochs": 25,
    "batch_size": 256,
    "learning_rate": 1e-3,
    "betas": None,
    "weight_decay": 0.01,
    "schedule": "constant",
    "warmup": 0,
    "train_size": None,
    "test_size": None,
    # held out in tuning trials; final runs train on all 50,000 images
    "held_out": 5000,
    "depth": 6,
    "heads": 5,
    "patch": 4,
    "dim": 128,
    "head_dim": 64,
    "mlp_dim": 128,
    "curve": True,
}
# found with other seeds: the shortest training in which the plain model memorises its images
SMALL: dict[str, Any] = PAPER | {
    "batch_size": 50,
    "learning_rate": 3e-3,
    "betas": (0.9, 0.95),
    "schedule": "linear",
    "warmup": 0.1,
    "train_size": 2000,
    "test_size": 5000,
    "held_out": 0,
    "depth": 2,
    "patch": 8,
    "dim": 64,
    "head_dim": 16,
    "mlp_dim": 128,
    "curve": False,
}
# the size of `blog-sizes` at its largest number of images, at which the plain model memorises 10,000
MEDIUM: dict[str, Any] = SMALL | {
    "epochs": 25,
    "learning_rate": 1e-3,
    "dim": 96,
    "depth": 3,
    "mlp_dim": 96,
    "train_size": 10_000,
}
NOTES = (
    "Train accuracy and loss are measured in evaluation mode, without methods; 'train with methods' measures them "
    "while the methods act, as in the blog's curves of training.",
    "Memorised: at least 99 % of the training images are right.",
    "The blog does not state how it scales pixels or decays weights: here to [-1, 1], and by AdamW's default of 0.01.",
)


class BlogImages(Cifar):
    """Classification of CIFAR's images with the blog's model, with an outcome for memorised training images."""

    test_curve: ClassVar[bool] = False

    norm: NormPlace = "mlp"
    curve: bool = Field(
        True, description="training and test images are evaluated after every epoch too; nothing is chosen by it"
    )

    def all_metrics(self) -> tuple[Metric, ...]:
        """Return accuracy, loss, and whether the images are memorised, 0 or 1 for a run."""
        return (*super().all_metrics(), Metric("memorised", unit="%"))

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations, after every epoch with `curve`, and of training images also with methods active."""
        when: Literal["epoch", "end"] = "epoch" if self.curve else "end"
        acting = Evaluation(ACTING, split="train", output=in_training_mode)
        return [Evaluation("train", when=when), Evaluation("test", when=when), acting]

    def summary(self, outcomes: dict[str, float]) -> dict[str, float]:
        """Return for both evaluations of the training images whether they are memorised."""
        return {
            f"{evaluation}/memorised": float(outcomes[f"{evaluation}/accuracy"] >= MEMORISED)
            for evaluation in ("train", ACTING)
            if f"{evaluation}/accuracy" in outcomes
        }


def in_training_mode(model: nn.Module, inputs: Any) -> Any:
    """Return the outputs of a model in training mode, in which methods act, and reset it to evaluation mode."""
    model.train()
    try:
        return run_model(model, inputs)
    finally:
        model.eval()


def scales(**small: Any) -> dict[str, Scale]:
    """Return both scales; `small` changes settings of the small one."""
    return {"small": Scale(settings=SMALL | small, seeds=10), "paper": Scale(settings=PAPER, seeds=10)}


def more_images() -> dict[str, Scale]:
    """Return the scale between them, of 10,000 images; six seeds are the fewest that can decide."""
    return {"medium": Scale(settings=MEDIUM, seeds=6)}
