"""The largest stable learning rate of a ViT: without layer norm, with SigmaReparam instead, and with pre-LN.

Zhai et al. 2023, arXiv 2303.06296. Runs have no warm-up, a constant learning rate and few steps, as divergence occurs
early.
"""

from __future__ import annotations

from headwise.lab.experiments.premises import failure_arose, learned
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.short_cifar import ShortCifar

SOURCE = "Zhai et al. 2023, arXiv 2303.06296"
RATES = "{0.001,0.003,0.01,0.03}"
PLAIN = f"baseline | learning_rate={RATES}"
SIGMA = f'SigmaReparam(layers="all") | learning_rate={RATES}'
NORMED = f"baseline | norm=pre, learning_rate={RATES}"
HIGHEST = "baseline | learning_rate=0.03", 'SigmaReparam(layers="all") | learning_rate=0.03'

STUDY = Study(
    name="sigma-robust",
    title="SigmaReparam and the learning rate",
    question="Does a ViT without layer norm diverge at high learning rates, and does SigmaReparam keep it from that?",
    task=ShortCifar(norm="none", steps=100, train_size=3200, warmup=0.0, schedule="constant", weight_decay=0.0),
    task_place="headwise_papers.tasks.short_cifar:ShortCifar",
    methods=(),
    sweeps=(PLAIN, SIGMA, NORMED),
    premises=(learned("test/accuracy", 0.1, 0.1), failure_arose(HIGHEST[0])),
    claims=(
        Claim(
            text="Without layer norm the share of diverged runs rises with the learning rate.",
            source=SOURCE,
            tests=(ClaimTest(arm=PLAIN, outcome="diverged", says="rises"),),
        ),
        Claim(
            text="With SigmaReparam a model without layer norm diverges less often at thirty times the learning rate.",
            source=SOURCE,
            tests=(ClaimTest(arm=HIGHEST[1], outcome="diverged", says="lower", against=HIGHEST[0]),),
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
            }
            | {"steps": 2000, "train_size": None, "test_size": None, "dtype": "bfloat16"},
            seeds=10,
        ),
    },
    notes=(
        "Diverged: a loss that is not finite, or a smoothed loss above 1.5 × its minimum, which is near or above that "
        "of chance.",
        "A finished run may have learned nothing; its accuracy shows this.",
    ),
)
