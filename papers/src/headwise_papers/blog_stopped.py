"""DropHead against the plain model stopped early: does dropping heads do more than ending the training in time?

The blog (Meindl 2023) compares models that were trained to their end. There the plain model has memorised its images
and its test loss has doubled since its least, so that early stopping may do what a dropout method does.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from headwise.lab.experiments.premises import learned, memorised
from headwise.study import Claim, ClaimTest, Evaluation, Metric, Study
from headwise_papers.tasks.blog_claims import DROPOUT, TEST_ACCURACY
from headwise_papers.tasks.blog_images import NOTES, BlogImages, scales

DROP_HEAD = DROPOUT[1]
# outcomes at the epoch of the least validation loss
STOPPED = "test when stopped"
SCALES = scales(epochs=24)


class StoppedBlogImages(BlogImages):
    """The blog's task with validation images, whose least loss over the epochs says where early stopping ends a run."""

    validation_size: int = Field(1000, ge=1, description="training images at the end of the set, in no run's training")

    def all_metrics(self) -> tuple[Metric, ...]:
        """Return accuracy, loss, whether images are memorised, and the epoch of the stop."""
        return (*super().all_metrics(), Metric("epoch", "epoch of the stop", higher_is_better=False))

    def data(self, split: str) -> tuple[Tensor, Tensor] | None:
        """Return images (B, 3, 32, 32) as bytes, and classes; validation images are the last of the training set."""
        images, classes = super().data("test" if split == "test" else "train") or (torch.empty(0), torch.empty(0))
        if split == "test":
            return images, classes
        cut = slice(-self.validation_size, None) if split == "validation" else slice(-self.validation_size)
        return images[cut], classes[cut]

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations; validation and test images are evaluated after every epoch."""
        return [
            Evaluation("test", when="epoch") if evaluation.name == "test" else evaluation
            for evaluation in super().evaluations()
        ]

    def over_epochs(self, epochs: list[dict[str, float]]) -> dict[str, float]:
        """Return the test figures at the epoch of the least validation loss, the first of equal ones."""
        at = min(range(len(epochs)), key=lambda epoch: epochs[epoch]["validation/loss"])
        figures = {f"{STOPPED}/{metric}": epochs[at][f"test/{metric}"] for metric in ("accuracy", "loss")}
        return figures | {f"{STOPPED}/epoch": at + 1.0}


def _claim(text: str, test: ClaimTest) -> Claim:
    return Claim(
        text=text,
        source="our own question, on Meindl 2023",
        published={"figure": "not published"},
        tests=(test,),
        needs=("learned", "memorised"),
    )


STUDY = Study(
    name="blog-stopped",
    title="DropHead against the plain model stopped early, on CIFAR-10",
    question="Does DropHead do more than early stopping, where the plain model memorises its images?",
    task=StoppedBlogImages(name="cifar10", **SCALES["small"].settings),
    task_place="headwise_papers.blog_stopped:StoppedBlogImages",
    methods=(DROP_HEAD,),
    margin=TEST_ACCURACY,
    premises=(learned("test/accuracy", 0.1, 0.1), memorised()),
    claims=(
        _claim(
            "DropHead, trained to its end, has a higher test accuracy than the plain model stopped early.",
            ClaimTest(arm=DROP_HEAD, outcome="test/accuracy", says="higher", against_outcome=f"{STOPPED}/accuracy"),
        ),
        _claim(
            "DropHead, trained to its end, has a lower test loss than the plain model stopped early.",
            ClaimTest(arm=DROP_HEAD, outcome="test/loss", says="lower", against_outcome=f"{STOPPED}/loss"),
        ),
        _claim(
            "Where both are stopped early, DropHead has the higher test accuracy.",
            ClaimTest(arm=DROP_HEAD, outcome=f"{STOPPED}/accuracy", says="higher"),
        ),
        _claim(
            "Where both are stopped early, DropHead has the lower test loss.",
            ClaimTest(arm=DROP_HEAD, outcome=f"{STOPPED}/loss", says="lower"),
        ),
        _claim(
            "Stopping the plain model early raises its test accuracy.",
            ClaimTest(arm="baseline", outcome=f"{STOPPED}/accuracy", says="higher", against_outcome="test/accuracy"),
        ),
    ),
    scales=SCALES,
    notes=(
        *NOTES,
        "Stopped early: the epoch of the least loss on 1,000 validation images that no run trains on, of the same "
        "training and learning rates; test images choose nothing. Validation images cost DropHead's run at its end "
        "as much as the plain model's, which alone uses them.",
    ),
)
