"""The blog's experiment on CIFAR-10: its block, its seven methods and NeuTRENO, and which runs memorise the images.

The blog trains one seed for 25 epochs on the full training set (`--scale paper`). `--set norm=pre` asks whether the
verdicts depend on the block, which has no norm before attention: all arms change, the baseline with them.
"""

from __future__ import annotations

from headwise.lab.experiments.premises import learned, memorised
from headwise.study import Study
from headwise_papers.tasks.blog_claims import (
    DECORRELATION,
    TEST_ACCURACY,
    below_chance,
    best,
    conclusion,
    level,
    results,
)
from headwise_papers.tasks.blog_images import NOTES, BlogImages, more_images, scales

# margin in nats: 5 % of the plain model's test loss
SIMILAR = 0.18
SCALES = scales(epochs=24) | more_images()

STUDY = Study(
    name="blog-cifar10",
    title="The blog's regularizers of attention on CIFAR-10",
    question="Do the blog's findings on CIFAR-10 hold: dropout methods lower the test loss, "
    "Decorrelation has the best accuracy, and noise, norm and relaxation change nothing?",
    task=BlogImages(name="cifar10", **SCALES["small"].settings),
    task_place="headwise_papers.tasks.blog_images:BlogImages",
    margin=TEST_ACCURACY,
    premises=(
        learned("test/accuracy", 0.1, 0.1),
        memorised(),
        # ln 10
        below_chance(2.303),
    ),
    claims=(
        level("data", 0.6),
        *results("results on CIFAR-10", SIMILAR),
        best("results on CIFAR-10", DECORRELATION),
        *conclusion(SIMILAR),
    ),
    scales=SCALES,
    notes=NOTES,
)
