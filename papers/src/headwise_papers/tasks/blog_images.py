"""The blog's task: CIFAR's images, the blog's block, and who memorises the training images."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field
from torch import nn

from headwise.studies.vision_transformer import NormPlace
from headwise.study import Evaluation, Metric, Scale
from headwise.training.batches import run_model
from headwise_papers.tasks.cifar import Cifar

# share of the training images that a model which has memorised them gets right
MEMORISED = 0.99
# evaluates the training images as the blog's curves of training show them; its name stands first in outcomes
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
    # kept for tuning trials; final runs train on all 50,000 images
    "held_out": 5000,
    "depth": 6,
    "heads": 5,
    "patch": 4,
    "dim": 128,
    "head_dim": 64,
    "mlp_dim": 128,
    "curve": True,
}
# searched with other seeds for the least time in which the plain model memorises its images
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
NOTES = (
    "Train accuracy and loss are measured in evaluation mode, without methods; 'train with methods' measures them "
    "while the methods act, as the blog's curves of training do.",
    "Memorised: at least 99 % of the training images are right.",
    "The blog does not say how it scales pixels or decays weights: here to [-1, 1], and by AdamW's own 0.01.",
)


class BlogImages(Cifar):
    """Classify CIFAR's images with the blog's model, and tell which runs memorise their training images."""

    test_curve: ClassVar[bool] = False

    norm: NormPlace = "mlp"
    curve: bool = Field(
        True, description="training and test images are evaluated after every epoch too; nothing is chosen by it"
    )

    def all_metrics(self) -> tuple[Metric, ...]:
        """Return accuracy, loss, and whether the images are memorised: 0 or 1 for a run."""
        return (*super().all_metrics(), Metric("memorised", unit="%"))

    def evaluations(self) -> list[Evaluation]:
        """Evaluate the training images with the methods at work too, at the end; draw curves where they are wanted."""
        when = "epoch" if self.curve else "end"
        acting = Evaluation(ACTING, split="train", output=in_training_mode)
        return [Evaluation("train", when=when), Evaluation("test", when=when), acting]

    def summary(self, outcomes: dict[str, float]) -> dict[str, float]:
        """Say of both evaluations of the training images whether they are memorised."""
        return {
            f"{where}/memorised": float(outcomes[f"{where}/accuracy"] >= MEMORISED)
            for where in ("train", ACTING)
            if f"{where}/accuracy" in outcomes
        }


def in_training_mode(model: nn.Module, inputs: Any) -> Any:
    """Return the outputs of a model in training mode, in which methods act, and put it back into evaluation mode."""
    model.train()
    try:
        return run_model(model, inputs)
    finally:
        model.eval()


def scales(**small: Any) -> dict[str, Scale]:
    """Return both scales; `small` changes settings of the small one."""
    return {"small": Scale(settings=SMALL | small, seeds=10), "paper": Scale(settings=PAPER, seeds=10)}
