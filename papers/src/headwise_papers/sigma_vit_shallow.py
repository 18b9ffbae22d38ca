"""SigmaReparam, spectral norm and weight norm in a ViT of six layers without layer norm, which trains without them."""

from __future__ import annotations

from headwise.lab.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.short_cifar import ShortCifar

SOURCE = "Zhai et al. 2023, arXiv 2303.06296; here 6 layers and torch's initial weights"
BARE = "norm=none, warmup=0.0, weight_decay=0.0"
# each arm at the best of three rates, by test loss on another seed
PLAIN = f"baseline | learning_rate=0.003, {BARE}"
SIGMA = f'SigmaReparam(init="one", layers="all") | learning_rate=0.003, {BARE}'
SPECTRAL = f'SpectralNorm(layers="all") | learning_rate=0.003, {BARE}'
WEIGHT = f'WeightNorm(init="current", layers="all") | learning_rate=0.003, {BARE}'
# two points of test accuracy
MARGIN = 0.02


def behind(text: str, arm: str, against: str) -> Claim:
    """Return the claim that an arm is more than two points of test accuracy below another."""
    test = ClaimTest(arm=arm, outcome="test/accuracy", says="lower", by=MARGIN, against=against)
    return Claim(text=text, source=SOURCE, tests=(test,), needs=("learned",))


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
        behind(
            "At 6 layers without layer norm, SpectralNorm is more than two points behind SigmaReparam.", SPECTRAL, SIGMA
        ),
        behind(
            "At 6 layers without layer norm, WeightNorm is more than two points behind SigmaReparam.", WEIGHT, SIGMA
        ),
        behind(
            "At 6 layers without layer norm, the plain model is more than two points behind SigmaReparam.", PLAIN, SIGMA
        ),
        behind(
            "At 6 layers the plain model without layer norm is more than two points behind pre-LN.", PLAIN, "baseline"
        ),
        Claim(
            text="At 6 layers SigmaReparam without layer norm is less than two points behind pre-LN.",
            source=SOURCE,
            tests=(ClaimTest(arm=SIGMA, outcome="test/accuracy", says="higher", by=-MARGIN),),
            needs=("learned",),
        ),
    ),
    notes=(
        "pre-LN has a warm-up over a tenth of the steps and weight decay 0.05; the arms without norms have neither.",
        "Initial weights are torch's own, which keep each branch small. In sigma-vit they keep the variance of what "
        "enters a layer, and twelve layers without norms fail.",
        "The margin, two points of accuracy, was set before the final runs. Until 2026-11-28 the first four claims "
        "were own questions that asked the opposite, whether the arm is less than two points behind, and held.",
    ),
)
