"""SigmaReparam in a ViT without layer norm, warm-up and weight decay, against pre-LN, spectral norm and weight norm.

Zhai et al. 2023, arXiv 2303.06296: all linear layers and convolutions are reparametrized, and training also works with
LARS, a form of SGD.
"""

from __future__ import annotations

from headwise.lab.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Premise, Scale, Study
from headwise_papers.tasks.short_cifar import WeightedCifar

SOURCE = "Zhai et al. 2023, arXiv 2303.06296"
BARE = "norm=none, warmup=0.0, weight_decay=0.0"
# each arm at its best rate of those searched on another seed
PLAIN = f"baseline | {BARE}"
SIGMA = f'SigmaReparam(init="one", layers="all") | learning_rate=0.003, {BARE}'
LARS = f'SigmaReparam(init="one", layers="all") | learning_rate=0.01, optimizer=lars, trust=0.05, {BARE}'
SPECTRAL = f'SpectralNorm(layers="all") | learning_rate=0.01, {BARE}'
WEIGHT = f'WeightNorm(init="current", layers="all") | learning_rate=0.0003, {BARE}'
# pre-LN under LARS, the control of its claim, at the rate and trust of SigmaReparam's
LARS_CONTROL = "baseline | learning_rate=0.01, optimizer=lars, trust=0.05"
PREMISES = ("learned", "fails without norms")

STUDY = Study(
    name="sigma-vit",
    title="SigmaReparam in place of layer norm and warm-up",
    question="Does SigmaReparam train a ViT without layer norm, warm-up, weight decay and an adaptive optimizer as "
    "well as pre-LN does, where spectral norm and weight norm do not, and does it keep spectral norms low?",
    task=WeightedCifar(
        dim=48,
        depth=12,
        heads=3,
        mlp_dim=96,
        steps=800,
        train_size=25_600,
        # 1 / sqrt(dim): a linear layer keeps the variance of its inputs
        initial_std=0.144,
        watch_every=160,
        watch_statistics=("matrix_norm", "entropy_share", "max_logit"),
        head_statistics=("matrix_norm",),
    ),
    task_place="headwise_papers.tasks.short_cifar:WeightedCifar",
    methods=(PLAIN, SIGMA, LARS, SPECTRAL, WEIGHT, LARS_CONTROL),
    watch=True,
    # two points of test accuracy
    margin=0.02,
    seeds=8,
    premises=(
        learned("test/accuracy", 0.1, 0.1),
        Premise(
            name="fails without norms",
            text="Without norms and SigmaReparam the model does not learn: its test accuracy stays below 20 %",
            tests=(ClaimTest(arm=PLAIN, outcome="test/accuracy", says="lower", level=0.2),),
        ),
        Premise(
            name="LARS trains pre-LN",
            text="LARS itself trains pre-LN: its test accuracy is no more than two points below that of AdamW; added "
            "on 2026-11-26, after the other runs",
            # otherwise a slow optimizer cannot be distinguished from a failure of SigmaReparam
            tests=(ClaimTest(arm=LARS_CONTROL, outcome="test/accuracy", says="higher", by=-0.02),),
        ),
    ),
    claims=(
        Claim(
            text="SigmaReparam trains a ViT without layer norm, warm-up and weight decay to the accuracy of pre-LN.",
            source=SOURCE,
            tests=(ClaimTest(arm=SIGMA, outcome="test/accuracy", says="same"),),
            needs=PREMISES,
        ),
        Claim(
            text="With SigmaReparam SGD with LARS, no adaptive optimizer, trains a ViT to the accuracy of pre-LN.",
            source=SOURCE,
            tests=(ClaimTest(arm=LARS, outcome="test/accuracy", says="same"),),
            needs=(*PREMISES, "LARS trains pre-LN"),
        ),
        Claim(
            text="Spectral norm does not reach the accuracy of SigmaReparam.",
            source=f"{SOURCE}, which says that SpectralNorm constrains the model's capacity",
            tests=(ClaimTest(arm=SIGMA, outcome="test/accuracy", says="higher", against=SPECTRAL),),
            needs=PREMISES,
        ),
        Claim(
            text="Weight norm does not reach the accuracy of SigmaReparam.",
            source=f"{SOURCE}, a baseline there; weight norm bounds the rows of a matrix, and not its spectral norm",
            tests=(ClaimTest(arm=SIGMA, outcome="test/accuracy", says="higher", against=WEIGHT),),
            needs=PREMISES,
        ),
        Claim(
            text="SigmaReparam keeps the spectral norms of all weights below those of pre-LN, in the mean and the "
            "largest.",
            source=SOURCE,
            tests=tuple(
                ClaimTest(arm=SIGMA, outcome=f"heads/matrix_norm/{which}", says="lower") for which in ("mean", "worst")
            ),
            needs=PREMISES,
            # init="one" begins at norms of 1, pre-LN at 2.07 in the mean
            kind="by construction",
        ),
        Claim(
            text="Entropy collapse is common in baselines: in training pre-LN's entropy falls below a third of "
            "ln(keys).",
            source=f"{SOURCE}, abstract",
            tests=(ClaimTest(arm="baseline", outcome="watched/entropy_share/least", says="lower", level=1 / 3),),
            needs=("learned",),
            kind="figures known",
        ),
    ),
    scales={
        "small": Scale(settings={"depth": 12}, seeds=8),
        # all images; the learning rates are those that were searched for `small`
        "gpu": Scale(
            settings={
                "dim": 384,
                "depth": 12,
                "heads": 6,
                "mlp_dim": 1536,
                "patch": 4,
                "batch_size": 256,
                "steps": None,
                "epochs": 25,
                "train_size": None,
                "test_size": None,
                "watch_every": 1000,
                "initial_std": 0.051,
                "dtype": "bfloat16",
            },
            seeds=6,
        ),
        "paper": Scale(
            settings={
                "dim": 768,
                "depth": 12,
                "heads": 12,
                "head_dim": 64,
                "mlp_dim": 3072,
                "patch": 4,
                "batch_size": 256,
                "steps": None,
                "epochs": 300,
                "train_size": None,
                "test_size": None,
                "watch_every": 2000,
                "initial_std": 0.036,
                "dtype": "bfloat16",
            },
            seeds=3,
        ),
    },
    notes=(
        "The paper trains ViT-B, L and H on ImageNet; CIFAR-10 replaces it here, at the paper's scale with the "
        "shape of ViT-B.",
        "pre-LN has a warm-up over a tenth of the steps and weight decay 0.05; the arms without norms have "
        "neither. Each arm has the best of four to six learning rates, by test loss on another seed, except pre-LN "
        "under LARS, which has the rate and trust of SigmaReparam under LARS.",
        "Initial weights keep the variance of what enters a layer: from N(0, 1/width). With torch's smaller ones "
        "deep models without norms stay near the identity, and train without help.",
        "The margin, two points of accuracy, was set before the final runs.",
    ),
)
