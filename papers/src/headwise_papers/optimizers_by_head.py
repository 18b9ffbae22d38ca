"""A study of optimizers that treat heads one by one: five optimizers, plain and with two remedies for large logits."""

from __future__ import annotations

from headwise.lab.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.budget_ladder import BudgetLadder
from headwise_papers.tasks.rate_ladder import UNIGRAM
from headwise_verdict.results.records import Premise

MUON, BY_HEAD, HYPERBALL, STIEFEL = OPTIMIZERS = tuple(
    f"baseline | optimizer={name}" for name in ("muon", "muon-head", "muon-hyperball", "muon-stiefel")
)
NORM, CLIP = 'QKNorm(norm="rms")', "QKClip(threshold=100.0)"
NORMED = tuple(arm.replace("baseline", NORM) for arm in ("baseline", *OPTIMIZERS))
# QKClip shrinks weights whose size Hyperball and Stiefel fix, so that it is not combined with these two
CLIPPED = tuple(arm.replace("baseline", CLIP) for arm in ("baseline", MUON, BY_HEAD))
CRITICAL, BEST, STEPS = "test/critical_rate", "test/best_loss", "test/steps_to_target"
FAILS, LOGITS = "rate 0.5/test/loss", "rate 0.05/health/max_logit"
PREMISES = ("learned",)
HYPERBALL_2026 = "Wen et al. 2026, arXiv 2606.16899"
GLM_5 = "GLM-5, Zhipu AI 2026, arXiv 2602.15763"
YOSHIHARA = "Yoshihara 2026, arXiv 2606.13276"


STUDY = Study(
    name="optimizers-by-head",
    title="Optimizers that treat heads one by one",
    question="At its own best rate, does Muon by head, Muon on hyperballs or Muon with heads on a Stiefel manifold "
    "reach a lower loss than Muon and AdamW, in fewer steps, and which rates does each bear?",
    task=BudgetLadder(
        rates=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
        budgets=(20, 40),
        level=3.0,
        target=2.75,
        dim=32,
        depth=3,
        heads=2,
        context=32,
        batch_size=16,
        steps=40,
        test_size=200,
        weight_decay=0.0,
    ),
    task_place="headwise_papers.tasks.budget_ladder:BudgetLadder",
    methods=(*OPTIMIZERS, *NORMED, *CLIPPED),
    premises=(
        learned("test/best_loss", UNIGRAM, 0.5, lower=True),
        learned("test/best_loss", UNIGRAM, 0.5, arm=MUON, lower=True),
        Premise(
            name="failure arose",
            text="AdamW and Muon, plain, fail at the highest rate: their test loss lies above 3 nats per character",
            tests=tuple(ClaimTest(arm=arm, outcome=FAILS, says="higher", level=3.0) for arm in ("baseline", MUON)),
        ),
    ),
    claims=(
        Claim(
            text="At its own best rate Muon reaches a lower loss than AdamW at its own.",
            source="Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982",
            published={"loss": "as AdamW's with about half of the operations (large models)"},
            tests=(ClaimTest(arm=MUON, outcome=BEST, says="lower"),),
            needs=PREMISES,
        ),
        Claim(
            text="At its own best rate Muon by head reaches a lower loss than Muon of whole projections.",
            source=GLM_5,
            published={"quality": "latent attention trained by Muon reaches that of grouped queries (in words)"},
            tests=(ClaimTest(arm=BY_HEAD, outcome=BEST, says="lower", against=MUON),),
            needs=PREMISES,
        ),
        Claim(
            text="Muon by head keeps the largest logit below that of Muon, at a rate that both bear.",
            source=GLM_5,
            published={"logits": "stable without clipping (in words)"},
            tests=(ClaimTest(arm=BY_HEAD, outcome=LOGITS, says="lower", against=MUON),),
            needs=PREMISES,
        ),
        Claim(
            text="Muon on hyperballs reaches a lower loss than Muon, each at its own best rate.",
            source=HYPERBALL_2026,
            published={"tokens": "20 to 30 % fewer to the loss with weight decay (up to 1.2 billion parameters)"},
            tests=(ClaimTest(arm=HYPERBALL, outcome=BEST, says="lower", against=MUON),),
            needs=PREMISES,
        ),
        Claim(
            text="Muon on hyperballs reaches a loss of 2.75 nats in fewer steps than Muon, over all rates.",
            source=HYPERBALL_2026,
            published={"tokens": "20 to 30 % fewer to the loss with weight decay (up to 1.2 billion parameters)"},
            tests=(ClaimTest(arm=HYPERBALL, outcome=STEPS, says="lower", against=MUON),),
            needs=PREMISES,
        ),
        Claim(
            text="Muon with attention on a Stiefel manifold, here head by head, reaches a lower loss than Muon.",
            source=YOSHIHARA,
            published={"loss": "3.368 instead of 3.386 with all matrices on the manifold (GPT-2 small, one seed)"},
            tests=(ClaimTest(arm=STIEFEL, outcome=BEST, says="lower", against=MUON),),
            needs=PREMISES,
        ),
        Claim(
            text="Heads on a Stiefel manifold keep the largest logit below that of Muon, at a rate that both bear.",
            source=YOSHIHARA,
            published={"logits": "bounded, as singular values stay 1 (in words)"},
            tests=(ClaimTest(arm=STIEFEL, outcome=LOGITS, says="lower", against=MUON),),
            needs=PREMISES,
        ),
        *(
            Claim(
                text=f"Under {words} a model with {remedy.partition('(')[0]} bears a higher learning rate than the "
                "plain one.",
                source=source,
                published={"critical rate": "not published for this model"},
                tests=(ClaimTest(arm=arm, outcome=CRITICAL, says="higher", against=plain),),
                needs=(*PREMISES, "failure arose"),
            )
            for remedy, source, arms in (
                (NORM, "Wortsman et al. 2023, arXiv 2309.14322", NORMED[:3]),
                (CLIP, "Kimi K2, Moonshot AI 2025, arXiv 2507.20534", CLIPPED),
            )
            for arm, plain, words in zip(
                arms, ("baseline", MUON, BY_HEAD), ("AdamW", "Muon", "Muon by head"), strict=True
            )
        ),
    ),
    scales={
        "small": Scale(seeds=6),
        "paper": Scale(
            settings={
                "dim": 512,
                "depth": 8,
                "heads": 8,
                "context": 512,
                "batch_size": 64,
                "steps": 2000,
                "budgets": (1000, 2000),
                "test_size": None,
                "dtype": "bfloat16",
            },
            seeds=5,
        ),
    },
    notes=(
        "Level, target, rates and premises were fixed on one seed, 1000, which is none of the study's.",
        "Muon takes each projection as it is stored, here separate; by head, and on a Stiefel manifold, it takes each "
        "head's rows of the queries, keys and values and columns of the output. On hyperballs each projection and MLP "
        "matrix keeps its norm. AdamW moves everything else. No arm has weight decay.",
        "The sources compare with weight decay and train for much longer: here is said what the first steps show.",
        "QKClip is not combined with hyperballs and Stiefel manifolds: it shrinks weights whose size these fix, and "
        "headwise refuses the pair.",
    ),
)
