"""Steps of optimizers to a loss that takes work: 2.65 nats per character, with budgets up to 160 steps.

In optimizers-by-head the target, 2.75, was reached by most arms with their first budget, so that steps could not be
compared. Target, rates and budgets of this study were fixed on the figures of that one, before any run of it.
"""

from __future__ import annotations

from headwise.lab.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.optimizers_by_head import BY_HEAD, HYPERBALL, HYPERBALL_2026, MUON, OPTIMIZERS, STEPS, STIEFEL
from headwise_papers.optimizers_by_head import YOSHIHARA as STIEFEL_2026
from headwise_papers.tasks.budget_ladder import BudgetLadder
from headwise_papers.tasks.rate_ladder import UNIGRAM
from headwise_verdict.results.records import Premise

JORDAN = "Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982"
BUDGETS, TARGET = (10, 20, 30, 40, 60, 80, 120, 160), 2.65
PREMISES = ("learned", "the target takes work", "the target is reached")


def _fewer(text: str, arm: str, source: str, published: dict[str, str], against: str = MUON) -> Claim:
    return Claim(
        text=text,
        source=source,
        published=published,
        tests=(ClaimTest(arm=arm, outcome=STEPS, says="lower", against=against),),
        needs=PREMISES,
    )


STUDY = Study(
    name="optimizers-by-head-steps",
    title="Optimizers that treat heads one by one: steps to a loss",
    question="Over a shared grid of rates, in how many steps do AdamW, Muon, Muon by head, on hyperballs and with "
    "heads on a Stiefel manifold reach 2.65 nats per character?",
    task=BudgetLadder(
        rates=(0.005, 0.01, 0.02, 0.05, 0.1),
        budgets=BUDGETS,
        level=3.0,
        target=TARGET,
        dim=32,
        depth=3,
        heads=2,
        context=32,
        batch_size=16,
        steps=BUDGETS[-1],
        test_size=200,
        weight_decay=0.0,
    ),
    task_place="headwise_papers.tasks.budget_ladder:BudgetLadder",
    methods=OPTIMIZERS,
    premises=(
        learned("test/best_loss", UNIGRAM, 0.5, lower=True),
        Premise(
            name="the target takes work",
            text="Muon does not reach the target with the first two budgets: it needs more than 20 steps",
            tests=(ClaimTest(arm=MUON, outcome=STEPS, says="higher", level=float(BUDGETS[1])),),
        ),
        Premise(
            name="the target is reached",
            text="AdamW, plain, reaches the target within the largest budget",
            tests=(ClaimTest(arm="baseline", outcome=STEPS, says="lower", level=float(BUDGETS[-1])),),
        ),
    ),
    claims=(
        _fewer(
            "Muon reaches 2.65 nats in fewer steps than AdamW, over all rates.",
            MUON,
            JORDAN,
            {"loss": "as AdamW's with about half of the operations (large models)"},
            against="baseline",
        ),
        _fewer(
            "Muon by head reaches 2.65 nats in fewer steps than Muon of whole projections.",
            BY_HEAD,
            "GLM-5, Zhipu AI 2026, arXiv 2602.15763",
            {"quality": "latent attention trained by Muon reaches that of grouped queries (in words)"},
        ),
        _fewer(
            "Muon on hyperballs reaches 2.65 nats in fewer steps than Muon, over all rates.",
            HYPERBALL,
            HYPERBALL_2026,
            {"tokens": "20 to 30 % fewer to the loss with weight decay (up to 1.2 billion parameters)"},
        ),
        _fewer(
            "Muon with heads on a Stiefel manifold reaches 2.65 nats in fewer steps than Muon, over all rates.",
            STIEFEL,
            STIEFEL_2026,
            {"loss": "3.368 instead of 3.386 with all matrices on the manifold (GPT-2 small, one seed)"},
        ),
    ),
    scales={"small": Scale(seeds=6)},
    notes=(
        "Target and budgets were fixed before any run, on the losses of optimizers-by-head at 40 steps: 2.70 for AdamW "
        "and 2.63 for Muon, each at its own best rate.",
        "Steps are interpolated linearly between budgets. An arm that never reaches the target counts with 160.",
        "No arm has weight decay; the sources compare with it, and train for much longer.",
    ),
)
