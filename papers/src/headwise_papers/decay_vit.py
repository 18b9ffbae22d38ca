"""Weight decay of attention in a vision transformer on CIFAR-10: the rank of its products.

Kobayashi, Akram and von Oswald 2024, arXiv 2410.23819, train on ImageNet for a day on one GPU and vary only the decay
of attention.
"""

from __future__ import annotations

from headwise.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.cifar import Cifar

AXIS = "baseline | attention_weight_decay={0,0.1,0.3,1,3}"
PAPER = "Kobayashi, Akram and von Oswald 2024, arXiv 2410.23819"
RANKS = ("pseudo_rank_vo", "pseudo_rank_qk")

STUDY = Study(
    name="decay-vit",
    title="Weight decay of attention in a vision transformer",
    question="Does decaying the attention of a vision transformer, and nothing else more, lower the rank of its "
    "products?",
    task=Cifar(
        name="cifar10",
        steps=400,
        batch_size=32,
        learning_rate=4e-3,
        warmup=40,
        schedule="cosine",
        weight_decay=0.1,
        attention_weight_decay=0.1,
        dim=64,
        depth=3,
        heads=2,
        head_dim=32,
        mlp_dim=128,
        patch=8,
        train_size=6400,
        test_size=2000,
        head_statistics=(*RANKS, "imbalance_vo", "nuclear_gap_vo", "nuclear_gap_qk"),
    ),
    task_place="headwise_papers.tasks.cifar:Cifar",
    methods=(),
    sweeps=(AXIS,),
    premises=(learned("test/accuracy", 0.1, 0.1),),
    claims=(
        Claim(
            text="The stronger the decay of attention's weights, the lower the pseudo-rank of a head's products.",
            source=PAPER,
            tests=tuple(ClaimTest(arm=AXIS, outcome=f"heads/{name}/mean", says="falls") for name in RANKS),
        ),
    ),
    scales={
        "small": Scale(seeds=10),
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
    ),
)
