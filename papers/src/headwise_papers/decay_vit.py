"""Weight decay of attention in a vision transformer on CIFAR-10: the rank of its products.

Kobayashi, Akram and von Oswald 2024, arXiv 2410.23819, train on ImageNet for a day on one GPU and vary only the decay
of attention. On pretrained models of unknown decay their claims on norms cannot be judged (decay-pretrained), so they
are judged on these models.
"""

from __future__ import annotations

from headwise.lab.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.cifar import Cifar
from headwise_papers.tasks.decay_claims import (
    GAPS,
    IMBALANCES,
    PAPER,
    RANK_GAPS,
    RANKS,
    axis,
    factor_ranks_meet,
    factors_balance,
    falls,
    mean,
    norms_meet,
    ranks_fall,
)

DECAYS = ("0", "0.1", "0.3", "1", "3")
AXIS, MOST = axis(*DECAYS), "baseline | attention_weight_decay=3"
DEPTH = 3

STUDY = Study(
    name="decay-vit",
    title="Weight decay of attention in a vision transformer",
    question="Does decaying the attention of a vision transformer, and nothing else more, lower the rank of its "
    "products?",
    task=Cifar(
        name="cifar10",
        steps=1200,
        batch_size=32,
        learning_rate=4e-3,
        warmup=40,
        schedule="cosine",
        weight_decay=0.1,
        attention_weight_decay=0.1,
        dim=64,
        depth=DEPTH,
        heads=2,
        head_dim=32,
        mlp_dim=128,
        patch=8,
        train_size=6400,
        test_size=2000,
        head_statistics=(*RANKS, *GAPS, *IMBALANCES, *RANK_GAPS),
    ),
    task_place="headwise_papers.tasks.cifar:Cifar",
    methods=(),
    seeds=8,
    sweeps=(AXIS,),
    premises=(learned("test/accuracy", 0.1, 0.1),),
    claims=(
        *ranks_fall(DECAYS, DEPTH, in_layers="measured"),
        Claim(
            text="At the strongest decay the Frobenius and nuclear norms of heads are nearly identical: less than 5 % "
            "apart.",
            source=f"{PAPER}, figures of LLaMA-2 7B; here models decayed by ourselves",
            tests=tuple(ClaimTest(arm=MOST, outcome=name, says="lower", level=0.05) for name in mean(*GAPS)),
        ),
        norms_meet(DECAYS),
        factors_balance(DECAYS),
        factor_ranks_meet(DECAYS),
        Claim(
            text="The stronger the decay of attention, the smaller the gap of training and test accuracy.",
            source="ours: whether models of lower rank generalise better",
            tests=falls(AXIS, "gap/accuracy"),
        ),
    ),
    scales={
        "small": Scale(seeds=8),
        "paper": Scale(
            settings={
                "dim": 384,
                "depth": 12,
                "heads": 6,
                "head_dim": 64,
                "mlp_dim": 1536,
                "patch": 4,
                "batch_size": 256,
                "steps": 20_000,
                "warmup": 1000,
                "learning_rate": 1e-3,
                "train_size": None,
                "test_size": None,
                "dtype": "bfloat16",
            },
            seeds=5,
        ),
    },
    notes=(
        "The paper's scale is ImageNet; `--scale paper` is a transformer of its size on CIFAR-10, the data of this "
        "study.",
        "Gap: how far ½(‖A‖² + ‖B‖²) of a head's factors exceeds the nuclear norm of their product, in shares of it; "
        "imbalance: the difference of both Gram matrices as a share of theirs. "
        "Weights that merely shrink change neither.",
    ),
)
