"""The robustness of NeuTRENO (Nguyen et al. 2023, arXiv 2312.00751): a DeiT-like transformer on corrupted CIFAR-10.

The paper trains on ImageNet and tests on ImageNet-C, -A and -R. Here the fifteen corruptions of CIFAR-10-C are computed
from their definitions.
"""

from __future__ import annotations

from typing import Any

from headwise.lab.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.corrupted_cifar import CorruptedCifar

NEUTRENO = "NeuTRENO(strength=0.6)"
SMALL: dict[str, Any] = {
    "steps": 200,
    "batch_size": 32,
    "learning_rate": 2e-3,
    "schedule": "cosine",
    "warmup": 0.1,
    "weight_decay": 0.05,
    "dim": 48,
    "depth": 12,
    "heads": 3,
    "head_dim": 16,
    "mlp_dim": 96,
    "patch": 8,
    "images_each": 200,
    "clean_images": 2000,
}
# DeiT-tiny and its recipe (Touvron et al. 2020, arXiv 2012.12877) without its augmentation, on CIFAR-10
PAPER = SMALL | {
    "steps": None,
    "epochs": 300,
    "batch_size": 1024,
    "learning_rate": 1e-3,
    "warmup": 5 / 300,
    "dtype": "bfloat16",
    "dim": 192,
    "head_dim": 64,
    "mlp_dim": 768,
    "patch": 4,
    "images_each": 10_000,
    "clean_images": 10_000,
}

STUDY = Study(
    name="neutreno-robust",
    title="NeuTRENO on corrupted images",
    question="Does NeuTRENO lower the error of a vision transformer on corrupted images?",
    task=CorruptedCifar(**SMALL),
    task_place="headwise_papers.tasks.corrupted_cifar:CorruptedCifar",
    methods=(NEUTRENO, "FeatScale()"),
    premises=(learned("test/error", 0.9, 0.1, lower=True),),
    claims=(
        Claim(
            text="NeuTRENO lowers the mean corruption error.",
            source="Nguyen et al. 2023, arXiv 2312.00751, ImageNet-C with DeiT-tiny",
            published={"mCE, softmax": "71.6", "mCE, NeuTRENO": "70.1"},
            # relative to softmax: 70.1 is 2.1 % less than 71.6
            tests=(ClaimTest(arm=NEUTRENO, outcome="corrupted/mce", says="lower", effect=-0.021),),
        ),
    ),
    scales={"small": Scale(settings=SMALL, seeds=10), "paper": Scale(settings=PAPER, seeds=5)},
    notes=(
        "The paper's mCE is relative to AlexNet's errors; here it is relative to fixed errors of the plain model on "
        "other seeds, so that the baseline is near 100 % and a difference is one relative to it.",
        "Published on ImageNet-A (accuracy 6.9 to 8.2 %) and ImageNet-R (32.83 to 33.82 %) too: other photographs, "
        "which have no counterpart for CIFAR-10. These two figures are not tested here.",
    ),
)
