"""NeuTRENO on kernel attention: the linear attention of Katharopoulos et al. 2020, with and without NeuTRENO."""

from __future__ import annotations

from headwise.lab.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.deit import PUBLISHED, SMALL, DeiT

KERNEL = "LinearAttention()"
BOTH = f"{KERNEL} + NeuTRENO(strength=0.2)"

STUDY = Study(
    name="neutreno-kernel",
    title="NeuTRENO on kernel attention",
    question="Does NeuTRENO raise the accuracy of a transformer whose attention is linear, with the kernel elu + 1?",
    task=DeiT(**SMALL, head_statistics=("stream_cosine", "final_cosine", "attention_entropy")),
    task_place="headwise_papers.tasks.deit:DeiT",
    methods=(KERNEL, BOTH),
    premises=(learned("test/accuracy", 0.1, 0.1),),
    claims=(
        Claim(
            text="NeuTRENO raises the accuracy of kernel attention.",
            source="Nguyen et al. 2023, arXiv 2312.00751, Table 8",
            published={"top-1": "75.89 → 76.75 (CIFAR-10)"},
            tests=(ClaimTest(arm=BOTH, outcome="test/accuracy", says="higher", against=KERNEL, effect=0.0086),),
        ),
        Claim(
            text="NeuTRENO keeps the tokens of kernel attention less alike.",
            source="what it is for; the paper shows it of softmax attention: Nguyen et al. 2023, arXiv 2312.00751, "
            "Fig. 1",
            published={"cosine": "not published of kernel attention"},
            tests=(ClaimTest(arm=BOTH, outcome="heads/final_cosine/mean", says="lower", against=KERNEL),),
        ),
    ),
    scales={"small": Scale(settings={}, seeds=10), "paper": Scale(settings=PUBLISHED, seeds=5)},
    notes=(
        "The paper names the data, twelve layers and a kernel, but not the recipe; the scale paper uses that of "
        "neutreno-cifar. The strength 0.2 is that of the authors' code for linear attention.",
        "The baseline is softmax attention in the same model.",
    ),
)
