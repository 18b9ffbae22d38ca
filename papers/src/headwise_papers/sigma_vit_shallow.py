"""SigmaReparam, spectral norm and weight norm in a ViT of six layers without layer norm, which trains without them."""

from __future__ import annotations

from headwise.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.short_cifar import ShortCifar

OURS = "our own question"
BARE = "norm=none, warmup=0.0, weight_decay=0.0"
# each arm at the best of three rates, by test loss on another seed
PLAIN = f"baseline | learning_rate=0.003, {BARE}"
SIGMA = f'SigmaReparam(init="one", layers="all") | learning_rate=0.003, {BARE}'
SPECTRAL = f'SpectralNorm(layers="all") | learning_rate=0.003, {BARE}'
WEIGHT = f'WeightNorm(init="current", layers="all") | learning_rate=0.003, {BARE}'
# two points of test accuracy
MARGIN = 0.02


def not_behind(text: str, arm: str, against: str) -> Claim:
    """Return the claim that an arm is less than two points of test accuracy below another."""
    test = ClaimTest(arm=arm, outcome="test/accuracy", says="higher", by=-MARGIN, against=against)
    return Claim(text=text, source=OURS, tests=(test,), needs=("learned",))


STUDY = Study(
    name="sigma-vit-shallow",
    title="SigmaReparam where a ViT trains without layer norm anyway",
    question="Do spectral norm and weight norm train six layers without layer norm as well as SigmaReparam does, and "
    "does the plain model need any of them?",
    task=ShortCifar(),
    task_place="headwise_papers.tasks.short_cifar:ShortCifar",
    methods=(PLAIN, SIGMA, SPECTRAL, WEIGHT),
    margin=MARGIN,
    seeds=8,
    scales={"small": Scale(seeds=8)},
    premises=(learned("test/accuracy", 0.1, 0.1),),
    claims=(
        not_behind("Without layer norm, SpectralNorm is less than two points behind SigmaReparam.", SPECTRAL, SIGMA),
        not_behind("Without layer norm, WeightNorm is less than two points behind SigmaReparam.", WEIGHT, SIGMA),
        not_behind("Without layer norm, the plain model is less than two points behind SigmaReparam.", PLAIN, SIGMA),
        not_behind("The plain model without layer norm is less than two points behind pre-LN.", PLAIN, "baseline"),
        not_behind("SigmaReparam without layer norm is less than two points behind pre-LN.", SIGMA, "baseline"),
    ),
    notes=(
        "pre-LN has a warm-up over a tenth of the steps and weight decay 0.05; the arms without norms have neither.",
        "Initial weights are torch's own, which keep each branch small. In sigma-vit they keep the variance of what "
        "enters a layer, and twelve layers without norms fail.",
        "The margin, two points of accuracy, was set before the final runs.",
    ),
)
