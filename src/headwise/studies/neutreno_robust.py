"""NeuTRENO's robustness (Nguyen et al. 2023, arXiv 2312.00751, table 3): a DeiT-like transformer on CIFAR-10, judged on corrupted images.

The paper trains on ImageNet and reads ImageNet-C, -A and -R. Here the fifteen corruptions of CIFAR-10-C are made from their definitions;
ImageNet-A and -R are other photographs, which have no counterpart for CIFAR-10.
"""

from __future__ import annotations

from headwise.comparing.results.records import ClaimRecord, ClaimTest
from headwise.comparing.study import Scale, Study
from headwise.studies.tasks.corrupted_cifar import CorruptedCifar

SMALL = {
    "steps": 300,
    "batch_size": 32,
    "learning_rate": 2e-3,
    "schedule": "cosine",
    "warmup": 0.1,
    "weight_decay": 0.05,
    "dim": 64,
    "depth": 12,
    "heads": 4,
    "head_dim": 16,
    "mlp_dim": 128,
    "patch": 8,
}

STUDY = Study(
    name="neutreno-robust",
    title="NeuTRENO on corrupted images",
    question="Does NeuTRENO lower the error on corrupted images, as published for ImageNet-C?",
    task=CorruptedCifar(**SMALL),
    task_place="headwise.studies.tasks.corrupted_cifar:CorruptedCifar",
    methods=("NeuTRENO(strength=0.6)", "FeatScale()"),
)
