"""SigmaReparam in a ViT without layer norm, warm-up and weight decay, against pre-LN, spectral norm and weight norm.

Zhai et al. 2023, arXiv 2303.06296: all linear layers and convolutions are reparametrized, and training also works with
LARS, a form of SGD.
"""

from __future__ import annotations

from headwise.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.short_cifar import ShortCifar

SOURCE = "Zhai et al. 2023, arXiv 2303.06296"
BARE = "norm=none, warmup=0.0, weight_decay=0.0"
SIGMA = 'SigmaReparam(init="current", layers="all") | learning_rate=0.005, norm=none, warmup=0.0, weight_decay=0.0'
LARS = (
    'SigmaReparam(init="current", layers="all") | learning_rate=0.1, norm=none, optimizer=lars, trust=0.05, '
    "warmup=0.0, weight_decay=0.0"
)
SPECTRAL = f'SpectralNorm(layers="all") | {BARE}'
WEIGHT = f'WeightNorm(init="current", layers="all") | {BARE}'
ATTENTION = [f"blocks.{depth}.attn.{part}" for depth in range(6) for part in ("qkv q", "qkv k", "qkv v", "proj o")]

STUDY = Study(
    name="sigma-vit",
    title="SigmaReparam in place of layer norm and warm-up",
    question="Does SigmaReparam train a ViT without layer norm, warm-up, weight decay and an adaptive optimizer as "
    "well as pre-LN does, where spectral norm and weight norm do not, and does it keep spectral norms low?",
    task=ShortCifar(
        watch_every=80,
        watch_statistics=("matrix_norm", "entropy_share", "max_logit"),
        head_statistics=("matrix_norm",),
    ),
    task_place="headwise_papers.tasks.short_cifar:ShortCifar",
    methods=(f"baseline | {BARE}", SIGMA, LARS, SPECTRAL, WEIGHT),
    watch=True,
    # two points of test accuracy
    margin=0.02,
    premises=(learned("test/accuracy", 0.1, 0.1),),
    claims=(
        Claim(
            text="SigmaReparam trains a ViT without layer norm, warm-up and weight decay to the accuracy of pre-LN.",
            source=SOURCE,
            tests=(ClaimTest(arm=SIGMA, outcome="test/accuracy", says="same"),),
        ),
        Claim(
            text="With SigmaReparam SGD with LARS, no adaptive optimizer, trains a ViT to the accuracy of pre-LN.",
            source=SOURCE,
            tests=(ClaimTest(arm=LARS, outcome="test/accuracy", says="same"),),
        ),
        Claim(
            text="Spectral norm and weight norm do not reach the accuracy of SigmaReparam.",
            source="ours: the source says that SpectralNorm constrains the model's capacity",
            tests=tuple(
                ClaimTest(arm=SIGMA, outcome="test/accuracy", says="higher", against=other)
                for other in (SPECTRAL, WEIGHT)
            ),
        ),
        Claim(
            text="SigmaReparam keeps the spectral norms of the attention weights below those of pre-LN.",
            source=SOURCE,
            tests=tuple(ClaimTest(arm=SIGMA, outcome=f"heads/matrix_norm/{name}", says="lower") for name in ATTENTION),
        ),
    ),
    scales={
        "small": Scale(settings={"depth": 6}, seeds=10),
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
                "dtype": "bfloat16",
            },
            seeds=3,
        ),
    },
    notes=(
        "The paper trains ViT-B, L and H on ImageNet; CIFAR-10 replaces it here, at the paper's scale with the "
        "shape of ViT-B.",
        "pre-LN has a warm-up over a tenth of the steps and weight decay 0.05; the other arms have neither. The "
        "learning rates were set after runs on other seeds.",
        "The margin, two points of accuracy, was set before the final runs.",
    ),
)
