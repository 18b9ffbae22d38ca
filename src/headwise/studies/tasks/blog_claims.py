"""The blog's claims (Meindl 2023), sentence by sentence, each with what must be seen of it; the blog's studies share them.

The blog shows curves of one seed and few figures, so that no effect has a published size. Where it says "similar" or "no
significant effect", a margin says what counts as none; the margins were fixed before the reported runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from headwise.comparing.results.records import ClaimRecord, ClaimTest
from headwise.studies.tasks.blog_images import ACTING

BLOG = "Meindl 2023, 'Regularization Techniques for Attention Layers in Transformer Models' (a blog)"
DROPOUT = ("DropColumn(p=0.2)", "DropHead(p=0.2)")
DECORRELATION = "Decorrelation(strength=1.0)"
# relaxation, noise and norm: what the blog finds to change nothing
IDLE = (
    "RelaxedAttention(gamma=0.1)",
    "InputNoise(scale=0.01)",
    "InputNoise(scale=0.01, per_head=True)",
    "AttentionNormPenalty(strength=1.0)",
)
OTHERS = (*IDLE, DECORRELATION)
ALL = (*DROPOUT, *OTHERS)
# margins of "same": points of accuracy as shares, losses in nats; DRAMATIC is what a dramatic change would exceed
TEST_ACCURACY, TRAIN_ACCURACY, TEST_LOSS, TRAIN_LOSS, DRAMATIC = 0.015, 0.01, 0.1, 0.05, 0.1
Tests = tuple[ClaimTest, ...]


def tests(
    arms: Iterable[str],
    says: Literal["higher", "lower", "same"],
    outcome: str,
    margin: float | None = None,
    against: str = "baseline",
) -> Tests:
    """Say the same of several arms."""
    return tuple(ClaimTest(arm=arm, outcome=outcome, says=says, against=against, margin=margin) for arm in arms)


def claim(where: str, text: str, *said: Tests, published: dict[str, str] | None = None) -> ClaimRecord:
    """Make a claim of the section `where` of the blog."""
    every = tuple(test for part in said for test in part)
    return ClaimRecord(text=text, source=f"{BLOG}, {where}", published=published or {}, tests=every)


def results(where: str) -> tuple[ClaimRecord, ...]:
    """Give what the results say of both data sets: training, test loss, test accuracy."""
    return (
        claim(
            where,
            "Only the two dropout methods cannot memorise the training examples; all others reach the plain model's accuracy on them.",
            tests(DROPOUT, "lower", "train/accuracy"),
            tests(OTHERS, "same", "train/accuracy", TRAIN_ACCURACY),
        ),
        claim(
            where,
            "While they act, as in the blog's curves of training, the two dropout methods keep the model from perfect accuracy on the training examples.",
            tests(DROPOUT, "lower", f"{ACTING}/accuracy"),
        ),
        claim(where, "The two dropout methods have a much lower test loss.", tests(DROPOUT, "lower", "test/loss")),
        claim(where, "All other methods have a similar test loss.", tests(OTHERS, "same", "test/loss", TEST_LOSS)),
        claim(
            where,
            "The two dropout methods have a higher test accuracy than the model without regularization.",
            tests(DROPOUT, "higher", "test/accuracy"),
        ),
    )


def improved(where: str) -> ClaimRecord:
    """Give the claim of who improves the test accuracy and who leaves it."""
    return claim(
        where,
        "The two dropout methods and Decorrelation improve the test accuracy; the others are about the same as without regularization.",
        tests((*DROPOUT, DECORRELATION), "higher", "test/accuracy"),
        tests(IDLE, "same", "test/accuracy", TEST_ACCURACY),
    )


def best(where: str, arm: str) -> ClaimRecord:
    """Give the claim that one method has the highest test accuracy of all."""
    rest = ("baseline", *(other for other in ALL if other != arm))
    against = tuple(test for other in rest for test in tests((arm,), "higher", "test/accuracy", against=other))
    return claim(where, f"{arm.partition('(')[0]} has the highest test accuracy.", against)


def level(where: str, accuracy: str) -> ClaimRecord:
    """Give the published level of the plain model, which only the same training on all images can show."""
    text = f"The model without regularization gets near-zero training error and only around {accuracy} test accuracy."
    return claim(where, text, published={"test accuracy": accuracy})


def conclusion() -> tuple[ClaimRecord, ...]:
    """Give what the conclusion says."""
    where = "conclusion"
    return (
        claim(
            where,
            "No method changes dramatically how well the model generalises.",
            tests(ALL, "same", "test/accuracy", DRAMATIC),
        ),
        claim(
            where,
            "Decorrelation trains like the plain model, and its test accuracy is higher.",
            tests((DECORRELATION,), "same", "train/loss", TRAIN_LOSS),
            tests((DECORRELATION,), "higher", "test/accuracy"),
        ),
        claim(
            where,
            "Noise, norm and relaxation have no effect on training and test.",
            tests(IDLE, "same", "train/accuracy", TRAIN_ACCURACY),
            tests(IDLE, "same", "test/accuracy", TEST_ACCURACY),
            tests(IDLE, "same", "test/loss", TEST_LOSS),
        ),
    )


def on_text(tested: str) -> tuple[ClaimRecord, ...]:
    """Give what the blog finds on images, asked of text: its further research."""
    where = f"found on images; its further research asks for text, here {tested}"
    return (
        *results(where),
        improved(where),
        *conclusion(),
    )
