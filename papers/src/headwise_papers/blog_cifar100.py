"""The blog's experiment on CIFAR-100: its block, its seven methods and NeuTRENO, and which runs memorise the images.

The blog trains one seed for 25 epochs on the full training set (`--scale paper`). `--set norm=pre` asks whether the
verdicts depend on the block, which has no norm before attention: all arms change, the baseline with them.
"""

from __future__ import annotations

from headwise.lab.experiments.premises import learned, memorised
from headwise.study import Study
from headwise_papers.tasks.blog_claims import (
    DROPOUT,
    TEST_ACCURACY,
    below_chance,
    best,
    conclusion,
    improved,
    level,
    results,
)
from headwise_papers.tasks.blog_images import NOTES, BlogImages, more_images, scales

# margin in nats: 5 % of the plain model's test loss in the search
SIMILAR = 0.23
SCALES = scales(epochs=30) | more_images()

STUDY = Study(
    name="blog-cifar100",
    title="The blog's regularizers of attention on CIFAR-100",
    question="Do the blog's findings on CIFAR-100 hold: dropout methods lower the test loss, "
    "DropHead has the best accuracy, and noise, norm and relaxation change nothing?",
    task=BlogImages(name="cifar100", **SCALES["small"].settings),
    task_place="headwise_papers.tasks.blog_images:BlogImages",
    margin=TEST_ACCURACY,
    premises=(
        learned("test/accuracy", 0.01, 0.05),
        memorised(),
        # ln 100
        below_chance(4.605),
    ),
    claims=(
        level("data", 0.3),
        *results("results on CIFAR-100", SIMILAR),
        improved("results on CIFAR-100"),
        best("results on CIFAR-100", DROPOUT[1]),
        *conclusion(SIMILAR),
    ),
    scales=SCALES,
    notes=NOTES,
)
