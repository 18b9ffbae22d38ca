"""SigmaReparam in self-supervised learning: SimCLR with a vision transformer on CIFAR-10, tested by a linear probe.

Zhai et al. 2023 train ViT-B on ImageNet for 100 and 300 epochs; this study trains a small ViT on a part of CIFAR-10.
"""

from __future__ import annotations

from headwise.lab.experiments.premises import better_than_untrained
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.contrast import Contrast

SOURCE = "Zhai et al. 2023, arXiv 2303.06296, SimCLR"
SIGMA = 'SigmaReparam(init="one", layers="all")'
ALONE = f"{SIGMA} | norm=none"
FROZEN = "baseline | frozen_patch=true"
SMALL = {
    "dim": 64,
    "depth": 3,
    "heads": 4,
    "mlp_dim": 128,
    "patch": 8,
    "train_size": 4000,
    "test_size": 2000,
    "batch_size": 32,
    "steps": 300,
    "learning_rate": 3e-3,
    "warmup": 0.1,
    "schedule": "cosine",
    "weight_decay": 0.0,
    "temperature": 0.2,
    "least_area": 0.4,
    "colour": 0.25,
    "grey": 0.1,
    "probe_epochs": 4,
    "probe_learning_rate": 3e-2,
}
PAPER = {
    "dim": 768,
    "depth": 12,
    "heads": 12,
    "mlp_dim": 3072,
    "patch": 4,
    "train_size": None,
    "test_size": None,
    "projection": 128,
    "least_area": 0.08,
    "colour": 0.5,
    "grey": 0.2,
    "probe_learning_rate": 1e-3,
    "batch_size": 1024,
    "steps": None,
    "epochs": 100,
    "probe_epochs": 90,
    "dtype": "bfloat16",
}
# meant for one GPU: all images and the strong views of Chen et al. 2020, with a narrow encoder
GPU = {
    "dim": 192,
    "depth": 6,
    "heads": 3,
    "mlp_dim": 768,
    "train_size": None,
    "test_size": None,
    "projection": 128,
    "temperature": 0.5,
    "least_area": 0.2,
    "colour": 0.5,
    "grey": 0.2,
    "learning_rate": 1e-3,
    "batch_size": 512,
    "steps": None,
    "epochs": 100,
    "probe_epochs": 10,
    "probe_learning_rate": 1e-2,
    "dtype": "bfloat16",
}

# accuracy of the probe on an encoder that was not trained, at the scale `small`; at `gpu` it is 0.34
UNTRAINED = 0.30

STUDY = Study(
    name="sigma-simclr",
    title="SigmaReparam in contrastive learning of images",
    question="Is SigmaReparam with pre-LN the best way to train a vision transformer by SimCLR, as a linear probe "
    "sees it?",
    task=Contrast.model_validate(SMALL),
    task_place="headwise_papers.tasks.contrast:Contrast",
    # the baseline is pre-LN
    methods=(FROZEN, ALONE, SIGMA),
    scales={
        "small": Scale(settings=SMALL, seeds=10),
        "gpu": Scale(settings=SMALL | GPU, seeds=6),
        "paper": Scale(settings=SMALL | PAPER, seeds=3),
    },
    premises=(better_than_untrained("test/accuracy", UNTRAINED, 0.05),),
    claims=(
        Claim(
            text="SigmaReparam with pre-LN is the best of the four: its linear probe is the most accurate.",
            source=SOURCE,
            tests=tuple(
                ClaimTest(arm=SIGMA, outcome="test/accuracy", says="higher", against=other)
                for other in ("baseline", FROZEN, ALONE)
            ),
        ),
    ),
    notes=(
        "Views: a random crop, a flip, changed colours, sometimes grey; without blur, as Chen et al. 2020 use on "
        "CIFAR-10. The scale `small` has milder views than the paper's (40 % of the area and more, colours of "
        "strength 0.25): in its 300 steps an encoder learns nothing from the strong ones.",
        "The probe is a second phase: a linear layer on the class token of the frozen encoder, whose reparametrized "
        "weights were folded into plain ones.",
    ),
)
