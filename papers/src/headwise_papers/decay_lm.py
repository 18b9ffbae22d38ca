"""Separate weight decay of attention and of MLPs in a character language model.

Kobayashi, Akram and von Oswald 2024, arXiv 2410.23819, train 125M parameters on the Pile with AdamW and vary one decay
at a time, with five runs each. The effect of a decay λ in n steps at a rate η is proportional to ηλn, which is small
here, so the axes have larger decays than the paper's.
"""

from __future__ import annotations

from headwise.lab.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.character_lm import CharacterLM
from headwise_papers.tasks.decay_claims import (
    GAPS,
    IMBALANCES,
    PAPER,
    RANK_GAPS,
    RANKS,
    axis,
    factor_ranks_meet,
    falls,
    mean,
    norms_meet,
    ranks_fall,
)
from headwise_papers.tasks.rate_ladder import UNIGRAM

DECAYS = ("0", "0.1", "0.3", "1", "3")
ATTENTION, MLP = axis(*DECAYS), "baseline | mlp_weight_decay={0,0.1,0.3,1,3}"
DEPTH = 2

STUDY = Study(
    name="decay-lm",
    title="Weight decay of attention and of MLPs in a language model",
    question="Does decaying attention lower the rank of its products, is a decay between none and much best, and does "
    "the decay of the MLPs matter more?",
    task=CharacterLM(
        steps=500,
        batch_size=32,
        learning_rate=1e-2,
        warmup=30,
        schedule="cosine",
        weight_decay=0.1,
        attention_weight_decay=0.1,
        mlp_weight_decay=0.1,
        dim=48,
        depth=DEPTH,
        heads=3,
        context=32,
        test_size=800,
        head_statistics=(*RANKS, *IMBALANCES, *GAPS, *RANK_GAPS),
    ),
    task_place="headwise_papers.tasks.character_lm:CharacterLM",
    methods=(),
    sweeps=(ATTENTION, MLP),
    premises=(learned("test/loss", UNIGRAM, 0.8, lower=True),),
    claims=(
        *ranks_fall(DECAYS, DEPTH),
        norms_meet(DECAYS, kind="figures known"),
        Claim(
            text="The stronger the decay of attention, the nearer is PᵀP to W_V W_Vᵀ.",
            source=PAPER,
            tests=falls(ATTENTION, *mean("imbalance_vo")),
            kind="figures known",
        ),
        factor_ranks_meet(DECAYS),
        Claim(
            text="The best decay of attention lies between none and much.",
            source=PAPER,
            tests=(ClaimTest(arm=ATTENTION, outcome="test/perplexity", says="inside"),),
        ),
        Claim(
            text="The best decay of the MLPs lies between none and much.",
            source=PAPER,
            tests=(ClaimTest(arm=MLP, outcome="test/perplexity", says="inside"),),
        ),
        Claim(
            text="The decay of the MLPs matters more: without it, and with much of it, the perplexity is worse than "
            "with as little or as much decay of attention.",
            source="ours: the source speaks of potential differences in sensitivity, and not of which is larger",
            tests=tuple(
                ClaimTest(
                    arm=f"baseline | mlp_weight_decay={value}",
                    outcome="test/perplexity",
                    says="higher",
                    against=f"baseline | attention_weight_decay={value}",
                )
                for value in ("0", "3")
            ),
        ),
    ),
    scales={
        "small": Scale(seeds=10),
        "paper": Scale(
            settings={
                "dim": 768,
                "depth": 12,
                "heads": 12,
                "context": 256,
                "batch_size": 64,
                "steps": 5000,
                "learning_rate": 6e-4,
                "warmup": 200,
                "test_size": None,
                "dtype": "bfloat16",
            },
            seeds=5,
        ),
    },
    notes=(
        "The paper's table of perplexities and its learning rate are not known here; its data and tokens differ. "
        "As there, no text is seen twice, so that a gap between training and test loss shows no generalisation.",
        "Gap: how far ½(‖A‖² + ‖B‖²) of a head's factors exceeds the nuclear norm of their product, as a share of it; "
        "imbalance: the norm of PᵀP − W_V W_Vᵀ as a share of the sum of both norms.",
    ),
)
