"""NeuTRENO at several depths: does a plain model stop gaining from more layers, and does NeuTRENO change that?"""

from __future__ import annotations

from headwise.lab.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.deit import PUBLISHED, SMALL, DeiT

PAPER = "Nguyen et al. 2023, arXiv 2312.00751"
DEPTHS = "{6,12,24,32}"
STRENGTH = "NeuTRENO(strength=0.6)"
PLAIN, NEUTRENO = f"baseline | depth={DEPTHS}", f"{STRENGTH} | depth={DEPTHS}"
DEEP, DEEP_NEUTRENO = "baseline | depth=24", f"{STRENGTH} | depth=24"
DEEPEST, DEEPEST_NEUTRENO = "baseline | depth=32", f"{STRENGTH} | depth=32"
TOP1, COSINE = "test/accuracy", "heads/final_cosine/mean"
LEARNED, DEEPEST_LEARNED = learned(TOP1, 0.1, 0.1), "32 layers learned"
# of claims up to 24 layers
NEEDS = (LEARNED.name,)

STUDY = Study(
    name="neutreno-depth",
    title="NeuTRENO and depth",
    question="Does the accuracy of a plain transformer stop rising with its depth as its tokens grow alike, and does "
    "it rise with NeuTRENO?",
    task=DeiT(**SMALL, head_statistics=("final_cosine",)),
    task_place="headwise_papers.tasks.deit:DeiT",
    methods=(),
    sweeps=(PLAIN, NEUTRENO),
    premises=(
        LEARNED,
        learned(TOP1, 0.1, 0.1, arm=DEEP),
        learned(TOP1, 0.1, 0.1, arm=DEEPEST).model_copy(update={"name": DEEPEST_LEARNED}),
    ),
    claims=(
        Claim(
            text="The plain model gains nothing by depth: 24 layers are less accurate than 12.",
            source=f"{PAPER}, on over-smoothing in transformers, after Zhou et al. 2021",
            published={"accuracy": "a ViT of 32 layers underperforms one of 24 (in words)"},
            tests=(ClaimTest(arm=DEEP, outcome=TOP1, says="lower"),),
            needs=NEEDS,
        ),
        Claim(
            text="With NeuTRENO it does: 24 layers are more accurate than 12.",
            source="our own question",
            published={"accuracy": "not published"},
            tests=(ClaimTest(arm=DEEP_NEUTRENO, outcome=TOP1, says="higher", against=f"{STRENGTH} | depth=12"),),
            needs=NEEDS,
        ),
        Claim(
            text="32 layers of the plain model are less accurate than 24.",
            source=f"{PAPER}, on over-smoothing in transformers, after Zhou et al. 2021",
            published={"accuracy": "a ViT of 32 layers underperforms one of 24 (in words)"},
            tests=(ClaimTest(arm=DEEPEST, outcome=TOP1, says="lower", against=DEEP),),
        ),
        Claim(
            text="At 24 layers NeuTRENO raises the accuracy.",
            source=f"{PAPER}, Table 1 at 12 layers",
            published={"top-1": "72.17 → 73.01 (ImageNet, 12 layers)"},
            tests=(ClaimTest(arm=DEEP_NEUTRENO, outcome=TOP1, says="higher", against=DEEP, effect=0.0084),),
            needs=NEEDS,
        ),
        Claim(
            text="At 32 layers NeuTRENO raises the accuracy.",
            source=f"{PAPER}, Table 1 at 12 layers",
            published={"top-1": "72.17 → 73.01 (ImageNet, 12 layers)"},
            tests=(ClaimTest(arm=DEEPEST_NEUTRENO, outcome=TOP1, says="higher", against=DEEPEST, effect=0.0084),),
        ),
        Claim(
            text="The tokens of the plain model grow more alike the deeper it is.",
            source=f"{PAPER}, Fig. 1",
            published={"cosine": "rises with the layer (a figure)"},
            tests=(ClaimTest(arm=PLAIN, outcome=COSINE, says="rises"),),
        ),
        Claim(
            text="At 24 layers NeuTRENO keeps the tokens less alike.",
            source=f"{PAPER}, Fig. 1",
            published={"cosine": "significantly lower (a figure, 12 layers)"},
            tests=(ClaimTest(arm=DEEP_NEUTRENO, outcome=COSINE, says="lower", against=DEEP),),
            needs=NEEDS,
        ),
    ),
    scales={"small": Scale(settings={}, seeds=8), "paper": Scale(settings=PUBLISHED, seeds=5)},
    notes=(
        "All depths train for the same number of steps at one learning rate; the other studies of NeuTRENO have 12 "
        "layers.",
    ),
)
