"""The blog's claims (Meindl 2023), sentence by sentence with their tests, which the studies of the blog share.

The blog shows curves of one seed and few figures, so no effect has a published size. Where it says "similar" or "no
significant effect", a margin defines it; the margins were fixed before the reported runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from headwise.study import Claim, ClaimTest, Premise
from headwise_papers.tasks.blog_images import ACTING

BLOG = "Meindl 2023, a blog on regularizing attention"
DROPOUT = ("DropColumn(p=0.2)", "DropHead(p=0.2)")
DECORRELATION = "Decorrelation(strength=1.0)"
# relaxation, noise and norm: methods without an effect according to the blog
IDLE = (
    "RelaxedAttention(gamma=0.1)",
    "InputNoise(scale=0.01)",
    "InputNoise(scale=0.01, per_head=True)",
    "AttentionNormPenalty(strength=1.0)",
)
OTHERS = (*IDLE, DECORRELATION)
ALL = (*DROPOUT, *OTHERS)
# margins of "same": accuracies as shares, losses in nats; DRAMATIC is the smallest dramatic change, AROUND the
# tolerance of "around 60 %"
TEST_ACCURACY, TRAIN_ACCURACY, TRAIN_LOSS, DRAMATIC, AROUND = 0.015, 0.01, 0.05, 0.1, 0.05
# premises of claims on memorised examples, on unseen examples, and on the loss of unseen examples
REMEMBERS, KNOWS, BELOW_CHANCE = ("memorised",), ("learned",), ("learned", "test loss below chance")
Tests = tuple[ClaimTest, ...]


def say(
    arms: Iterable[str],
    says: Literal["higher", "lower", "same"],
    outcome: str,
    margin: float | None = None,
    against: str = "baseline",
) -> Tests:
    """Return the same test for several arms."""
    return tuple(ClaimTest(arm=arm, outcome=outcome, says=says, against=against, margin=margin) for arm in arms)


def claim(
    where: str, text: str, *said: Tests, published: dict[str, str] | None = None, needs: tuple[str, ...] | None = None
) -> Claim:
    """Return a claim of the blog's section `where`; `needs` names its premises, None: all."""
    every = tuple(test for part in said for test in part)
    return Claim(text=text, source=f"{BLOG}, {where}", published=published or {}, tests=every, needs=needs)


def below_chance(chance: float) -> Premise:
    """Return the premise that the dropout methods' test loss is below `chance` nats, that of a trivial predictor.

    Of models that are worse than chance, a lower loss does not show better generalisation.
    """
    return Premise(
        name=BELOW_CHANCE[1],
        text=f"The dropout methods' test loss is below that of the trivial predictor, {chance:.4g} nats",
        tests=tuple(ClaimTest(arm=arm, outcome="test/loss", says="lower", level=chance) for arm in DROPOUT),
    )


def results(where: str, similar: float) -> tuple[Claim, ...]:
    """Return the claims of the blog's results on training, test loss and test accuracy.

    Losses within `similar` nats count as similar.
    """
    return (
        claim(
            where,
            "Only the two dropout methods cannot memorise the training examples; all others reach the plain model's "
            "accuracy on them.",
            say(DROPOUT, "lower", "train/accuracy"),
            say(OTHERS, "same", "train/accuracy", TRAIN_ACCURACY),
            needs=REMEMBERS,
        ),
        claim(
            where,
            "While they act, as in the blog's curves of training, the two dropout methods keep the model from perfect "
            "accuracy on the training examples.",
            say(DROPOUT, "lower", f"{ACTING}/accuracy"),
            needs=REMEMBERS,
        ),
        claim(
            where,
            "The two dropout methods have a much lower test loss.",
            say(DROPOUT, "lower", "test/loss"),
            needs=BELOW_CHANCE,
        ),
        claim(
            where,
            "All other methods have a similar test loss.",
            say(OTHERS, "same", "test/loss", similar),
            # that they do not lower the loss as dropout does means something only where dropout's is below chance
            needs=BELOW_CHANCE,
        ),
        claim(
            where,
            "The two dropout methods have a higher test accuracy than the model without regularization.",
            say(DROPOUT, "higher", "test/accuracy"),
            needs=KNOWS,
        ),
    )


def improved(where: str) -> Claim:
    """Return the claim on which methods improve the test accuracy and which do not change it."""
    return claim(
        where,
        "The two dropout methods and Decorrelation improve the test accuracy; the others are about the same as "
        "without regularization.",
        say((*DROPOUT, DECORRELATION), "higher", "test/accuracy"),
        say(IDLE, "same", "test/accuracy", TEST_ACCURACY),
        needs=KNOWS,
    )


def best(where: str, arm: str) -> Claim:
    """Return the claim that one method has the highest test accuracy of all."""
    rest = ("baseline", *(other for other in ALL if other != arm))
    against = tuple(test for other in rest for test in say((arm,), "higher", "test/accuracy", against=other))
    return claim(where, f"{arm.partition('(')[0]} has the highest test accuracy.", against, needs=KNOWS)


def level(where: str, accuracy: float) -> Claim:
    """Return the claim on the plain model's accuracy, which only the blog's own settings on all images can test."""
    text = (
        f"The model without regularization gets near-zero training error, but only around {accuracy:.0%} test accuracy."
    )
    common = {"arm": "baseline", "says": "same", "scale": "paper"}
    tests = (
        ClaimTest(**common, outcome="train/accuracy", level=1.0, margin=TRAIN_ACCURACY),
        ClaimTest(**common, outcome="test/accuracy", level=accuracy, margin=AROUND),
    )
    published = {"test accuracy": f"around {accuracy:.0%}"}
    return claim(where, text, tests, published=published, needs=(*KNOWS, *REMEMBERS))


def conclusion(similar: float) -> tuple[Claim, ...]:
    """Return the claims of the blog's conclusion; losses within `similar` nats count as similar."""
    where = "conclusion"
    return (
        claim(
            where,
            "No method changes dramatically how well the model generalises.",
            say(ALL, "same", "test/accuracy", DRAMATIC),
            needs=KNOWS,
        ),
        claim(
            where,
            "Decorrelation trains like the plain model, and its test accuracy is higher.",
            say((DECORRELATION,), "same", "train/loss", TRAIN_LOSS),
            say((DECORRELATION,), "higher", "test/accuracy"),
            needs=KNOWS,
        ),
        claim(
            where,
            "Noise, norm and relaxation have no effect on training and test.",
            say(IDLE, "same", "train/accuracy", TRAIN_ACCURACY),
            say(IDLE, "same", "test/accuracy", TEST_ACCURACY),
            say(IDLE, "same", "test/loss", similar),
            needs=KNOWS,
        ),
    )


def on_text(tested: str, similar: float) -> tuple[Claim, ...]:
    """Return the blog's claims on images, applied to text as its further research suggests."""
    where = f"found on images; its further research asks for text, here {tested}"
    return (*results(where, similar), improved(where), *conclusion(similar))


class Doses(NamedTuple):
    """Sweeps over the strength of each of the blog's methods, as texts."""

    decorrelation: str
    norm: str
    noise: str
    relaxation: str
    columns: str
    heads: str


# ln 10
RELAXED_BELOW_CHANCE = Premise(
    name="relaxed test loss below chance",
    text="The test loss of the strongest relaxation is below that of the trivial predictor, 2.303 nats",
    tests=(ClaimTest(arm="RelaxedAttention(gamma=0.6)", outcome="test/loss", says="lower", level=2.303),),
)


def doses(axes: Doses, similar: float) -> tuple[Claim, ...]:
    """Return the blog's conjectures on other parameters, and own claims on larger doses."""
    drop_head = DROPOUT[1]
    plainly = drop_head.replace(")", ", rescale=False)")
    own = "ours: the blog tried one strength"

    def along(outcome: str, says: Literal["rises", "falls"], *swept: str) -> Tests:
        return tuple(ClaimTest(arm=axis, outcome=outcome, says=says) for axis in swept)

    return (
        claim(
            "results on CIFAR-100",
            "With more emphasis on the added loss, the models with Decorrelation (told first) and with Norm have a "
            "higher training loss.",
            along("train/loss", "rises", axes.decorrelation, axes.norm),
            needs=KNOWS,
        ),
        claim(
            "methods",
            "DropHead without rescaling, as the blog describes it, lowers the test loss as with it.",
            say((drop_head, plainly), "lower", "test/loss"),
            say((plainly,), "same", "test/loss", similar, against=drop_head),
            needs=KNOWS,
        ),
        claim(
            "conclusion",
            "Noise needs other parameters to have an effect: in units of the standard deviation, more of it lowers "
            "the test loss.",
            along("test/loss", "falls", axes.noise),
            say(IDLE[1:2], "same", "test/loss", similar),
            needs=KNOWS,
        ),
        claim(
            "conclusion",
            "Norm needs other parameters to have an effect: a larger strength lowers the test loss.",
            along("test/loss", "falls", axes.norm),
            needs=KNOWS,
        ),
        claim(
            "conclusion",
            "Relaxation needs other parameters to have an effect: more of it lowers the test loss.",
            along("test/loss", "falls", axes.relaxation),
            needs=(*KNOWS, RELAXED_BELOW_CHANCE.name),
        ),
        Claim(
            text="How much the penalties change is a matter of strength: at 10,000 both raise the test accuracy.",
            source=own,
            needs=KNOWS,
            tests=say(
                ("Decorrelation(strength=10000)", "AttentionNormPenalty(strength=10000)"), "higher", "test/accuracy"
            ),
        ),
        Claim(
            text="The more columns or heads are dropped, the smaller the gap of training and test accuracy.",
            source=own,
            needs=KNOWS,
            tests=along("gap/accuracy", "falls", axes.columns, axes.heads),
        ),
        Claim(
            text="The more columns or heads are dropped, up to a share of 0.6, the lower the test loss.",
            source=own,
            needs=KNOWS,
            tests=along("test/loss", "falls", axes.columns, axes.heads),
        ),
    )
