"""The blog's methods at several numbers of training images: accuracy, generalisation gap and similarity of heads.

The blog (Meindl 2023) expects overfitting "when there is limited training data" but only trains on all images; its
Decorrelation is intended to make heads differ, which it does not measure.
"""

from __future__ import annotations

from headwise.lab.experiments.premises import learned, memorised
from headwise.lab.experiments.subject import Phase
from headwise.study import Claim, ClaimTest, Evaluation, Metric, Study
from headwise_papers.tasks.blog_claims import BLOG, DECORRELATION, DROPOUT
from headwise_papers.tasks.blog_images import NOTES, BlogImages, scales

FEW, MIDDLE, MANY = 1000, 3000, 10_000
EPOCHS = 25
# threshold of a "very large" gap: half of the 40 points in the blog's figures
LARGE = 0.2
ALIKE = "heads/head_redundancy/mean"
# premises of the largest number of images, and of the smallest
OF_MANY, OF_FEW = ("learned", "memorised"), f"memorised with {FEW:,} images"
SCALES = scales(
    epochs=EPOCHS, learning_rate=1e-3, dim=96, depth=3, head_dim=16, mlp_dim=96, test_size=2000, train_size=MANY
)


class SizedBlogImages(BlogImages):
    """The blog's task with training from scratch on each of several numbers of images in one run."""

    images: tuple[int, ...] = (FEW, MIDDLE, MANY)

    def all_metrics(self) -> tuple[Metric, ...]:
        """Return accuracy, loss, whether the images are memorised, and the gap of train and test accuracy."""
        return (*super().all_metrics(), Metric("gap", "train − test accuracy", higher_is_better=False, unit="%"))

    def phases(self) -> list[Phase]:
        """Return a phase for each number of images, each with new weights."""
        return [Phase(_images(count), changes={"train_size": count}, start="fresh") for count in self.images]

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations of training and test images after every phase."""
        return [Evaluation(name, when="phase") for name in ("train", "test")]

    def summary(self, outcomes: dict[str, float]) -> dict[str, float]:
        """Return the gap of training and test accuracy for every number of images."""
        outcome_names = [(_images(count), f"{_images(count)}/train/accuracy") for count in self.images]
        return {
            f"{name}/test/gap": outcomes[train] - outcomes[f"{name}/test/accuracy"] for name, train in outcome_names
        }


def _images(count: int) -> str:
    return f"{count} images"


def _claim(text: str, where: str, *tests: ClaimTest, needs: tuple[str, ...] = OF_MANY) -> Claim:
    words = {"figure": "none; in words"}
    return Claim(text=text, source=f"{BLOG}, {where}", published=words, tests=tests, needs=needs)


def _gains(count: int) -> Claim:
    return _claim(
        f"With {count:,} training images the two dropout methods raise the test accuracy.",
        "introduction and results",
        *(ClaimTest(arm=arm, outcome=f"{_images(count)}/test/accuracy", says="higher") for arm in DROPOUT),
    )


def _gap(count: int) -> str:
    return f"{_images(count)}/test/gap"


STUDY = Study(
    name="blog-sizes",
    title="The blog's regularizers of attention against the number of training images",
    question="Do the blog's methods help where images are few and where they are many, do they narrow the gap of "
    "training and test, and does Decorrelation make heads differ?",
    task=SizedBlogImages(name="cifar10", **SCALES["small"].settings, head_statistics=("head_redundancy",)),
    task_place="headwise_papers.blog_sizes:SizedBlogImages",
    methods=(*DROPOUT, DECORRELATION),
    premises=(
        learned("test/accuracy", 0.1, 0.1),
        memorised(),
        # a gap of training and test accuracy grows while a model learns its training images
        memorised(f"{_images(FEW)}/train/accuracy").model_copy(update={"name": OF_FEW}),
    ),
    claims=(
        *map(_gains, (FEW, MIDDLE, MANY)),
        _claim(
            "The gap of training and test accuracy is very large: above 20 points at every number of images.",
            "conclusion",
            *(ClaimTest(arm="baseline", outcome=_gap(n), says="higher", level=LARGE) for n in (FEW, MIDDLE, MANY)),
        ),
        _claim(
            f"Fewer images mean more overfitting: the plain model's gap is larger with {FEW:,} than with {MANY:,}.",
            "introduction",
            ClaimTest(arm="baseline", outcome=_gap(FEW), says="higher", against_outcome=_gap(MANY)),
            needs=(*OF_MANY, OF_FEW),
        ),
        *(
            _claim(
                f"The two dropout methods narrow the gap of training and test accuracy, with {count:,} images.",
                "conclusion",
                *(ClaimTest(arm=arm, outcome=_gap(count), says="lower") for arm in DROPOUT),
            )
            for count in (FEW, MANY)
        ),
        _claim(
            f"Decorrelation makes the heads of a layer attend less alike, with {MANY:,} images.",
            "methods",
            ClaimTest(arm=DECORRELATION, outcome=ALIKE, says="lower"),
        ),
        Claim(
            text=f"DropHead makes the heads of a layer attend more alike, with {MANY:,} images: each must do without "
            "the others.",
            source="our own question",
            published={"figure": "not published"},
            tests=(ClaimTest(arm=DROPOUT[1], outcome=ALIKE, says="higher"),),
            needs=OF_MANY,
        ),
    ),
    scales={"small": SCALES["small"].model_copy(update={"seeds": 8})},
    notes=(
        NOTES[0].partition(";")[0] + ".",
        *NOTES[1:],
        f"Every number of images is passed {EPOCHS} times, so that more images mean more steps. The figures under "
        "test, train and gap are those of the largest number. The similarity of heads is read on 512 test images.",
        "There is no paper scale: the blog trains only on all images.",
    ),
)
