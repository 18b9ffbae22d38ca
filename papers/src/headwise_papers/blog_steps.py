"""The blog's dropout methods at several numbers of training images and equally many steps: do they gain most from few?

The blog (Meindl 2023) expects that dropout in attention helps "especially when there is limited training data". With
equal passes more images mean more steps, so that data and steps change together (`blog-sizes`); here steps are equal.
"""

from __future__ import annotations

from headwise.lab.experiments.premises import learned, memorised
from headwise.study import Claim, ClaimTest, Metric, Study
from headwise_papers.blog_sizes import FEW, MANY, MIDDLE, SCALES, SizedBlogImages
from headwise_papers.tasks.blog_claims import BLOG, DROPOUT
from headwise_papers.tasks.blog_images import NOTES

STEPS = 3000
LESS = f"{FEW} less {MANY} images/change"
# of the plain model with the fewest images: at the end of a training it knows them
OF_FEW = f"memorised with {FEW:,} images"


class EqualStepsBlogImages(SizedBlogImages):
    """The blog's task on each of several numbers of images in one run, and how accuracy changes with their number."""

    def all_metrics(self) -> tuple[Metric, ...]:
        """Return the metrics of every number of images, and the change of test accuracy from more images to fewer."""
        return (*super().all_metrics(), Metric("change", "change of test accuracy", unit="%"))

    def summary(self, outcomes: dict[str, float]) -> dict[str, float]:
        """Return the gaps, and the test accuracy of each number of images less that of each larger number.

        The difference of two arms in such a change is the difference of their gains.
        """
        accuracy = {count: outcomes[f"{count} images/test/accuracy"] for count in sorted(self.images)}
        changes = {
            f"{few} less {many} images/change": accuracy[few] - accuracy[many]
            for few in accuracy
            for many in accuracy
            if few < many
        }
        return super().summary(outcomes) | changes


def _at(count: int) -> Claim:
    return Claim(
        text=f"With {count:,} training images and {STEPS:,} steps the two dropout methods raise the test accuracy.",
        source=f"{BLOG}, introduction and results",
        published={"figure": "none; in words"},
        tests=tuple(ClaimTest(arm=arm, outcome=f"{count} images/test/accuracy", says="higher") for arm in DROPOUT),
        needs=("learned",),
    )


STUDY = Study(
    name="blog-steps",
    title="The blog's dropout methods against the number of training images, with equal steps",
    question="Do dropping columns and dropping heads help most where images are few, when the steps are equally many?",
    task=EqualStepsBlogImages(name="cifar10", **SCALES["small"].settings, steps=STEPS),
    task_place="headwise_papers.blog_steps:EqualStepsBlogImages",
    methods=DROPOUT,
    seeds=8,
    premises=(
        learned("test/accuracy", 0.1, 0.1),
        memorised(f"{FEW} images/train/accuracy").model_copy(update={"name": OF_FEW}),
    ),
    claims=(
        Claim(
            text=f"Especially with limited data: with equal steps the two dropout methods gain more test accuracy with "
            f"{FEW:,} images than with {MANY:,}.",
            source=f"{BLOG}, introduction",
            published={"figure": "none; in words"},
            tests=tuple(ClaimTest(arm=arm, outcome=LESS, says="higher") for arm in DROPOUT),
            needs=("learned", OF_FEW),
        ),
        *map(_at, (FEW, MIDDLE, MANY)),
    ),
    scales={
        "small": SCALES["small"].model_copy(
            update={"settings": SCALES["small"].settings | {"steps": STEPS}, "seeds": 8}
        )
    },
    notes=(
        NOTES[0].partition(";")[0] + ".",
        *NOTES[1:],
        f"Every number of images is trained for {STEPS:,} steps of 50 images: {FEW:,} images are passed 150 times, "
        f"{MIDDLE:,} 50 times and {MANY:,} 15 times.",
        "The change of test accuracy is that with fewer images less that with more; its difference between an arm and "
        "the plain model is the gain with fewer images less the gain with more.",
    ),
)
