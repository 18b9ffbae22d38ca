"""Separate weight decay of attention and MLPs in a language model: its effect on the loss and on the rank by layer.

Kobayashi, Akram and von Oswald 2024, arXiv 2410.23819: decay that is good for the MLPs lowers the rank of attention,
and decoupling it "can enhance performance".
"""

from __future__ import annotations

from headwise.lab.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.character_lm import CharacterLM
from headwise_papers.tasks.decay_claims import PAPER, RANKS
from headwise_papers.tasks.rate_ladder import UNIGRAM

DEPTH = 4


def decayed(attention: float, mlp: float) -> str:
    """Return the arm with these weight decays of attention and MLPs."""
    changes = {"attention_weight_decay": attention, "mlp_weight_decay": mlp}
    changed = ", ".join(f"{name}={value}" for name, value in changes.items() if value != 0.1)
    return f"baseline | {changed}" if changed else "baseline"


WEAK, COUPLED, STRONG = decayed(0.1, 0.1), decayed(0.3, 0.3), decayed(1.0, 1.0)
FREE, STRONG_FREE, HALF_FREE = decayed(0.0, 0.3), decayed(0.0, 1.0), decayed(0.1, 0.3)


def _less_perplexity(text: str, *pairs: tuple[str, str]) -> Claim:
    """Return the claim that the first arm of each pair has a lower perplexity than the second."""
    return Claim(
        text=text,
        source=f"{PAPER}, summary",
        published={"perplexity": "lower with decoupled decay; the table of figures is not known here"},
        tests=tuple(ClaimTest(arm=arm, outcome="test/perplexity", says="lower", against=other) for arm, other in pairs),
    )


STUDY = Study(
    name="decay-decoupled",
    title="Weight decay of attention decoupled from that of the MLPs",
    question="Is a language model better whose attention decays less than its MLPs, and which layers' products lose "
    "rank to the decay?",
    task=CharacterLM(
        steps=3000,
        batch_size=16,
        learning_rate=1e-2,
        warmup=100,
        schedule="cosine",
        weight_decay=0.1,
        attention_weight_decay=0.1,
        mlp_weight_decay=0.1,
        dim=64,
        depth=DEPTH,
        heads=4,
        context=64,
        test_size=400,
        head_statistics=(*RANKS, "imbalance_vo", "nuclear_gap_vo", "nuclear_gap_qk"),
    ),
    task_place="headwise_papers.tasks.character_lm:CharacterLM",
    methods=(COUPLED, STRONG, FREE, STRONG_FREE, HALF_FREE),
    premises=(learned("test/loss", UNIGRAM, 0.8, lower=True),),
    claims=(
        _less_perplexity(
            "At a decay of 0.3 of the MLPs, attention without decay lowers the perplexity.", (FREE, COUPLED)
        ),
        _less_perplexity(
            "At a decay of 1 of the MLPs, attention without decay lowers the perplexity.", (STRONG_FREE, STRONG)
        ),
        _less_perplexity(
            "A decay of attention of a third of the MLPs' 0.3 lowers the perplexity.", (HALF_FREE, COUPLED)
        ),
        Claim(
            text="Decoupled decay is better than every coupled one that was tried: attention without decay and 0.3 on "
            "the MLPs has a lower perplexity than 0.1, 0.3 or 1 on both.",
            source="ours: whether the source compares with the best coupled decay is not known here",
            tests=tuple(
                ClaimTest(arm=FREE, outcome="test/perplexity", says="lower", against=coupled)
                for coupled in (WEAK, COUPLED, STRONG)
            ),
        ),
        Claim(
            text="Attention that decays with the MLPs loses rank in the mean over layers, in both products.",
            source=f"{PAPER}, figures of the rank against the decay",
            published={"rank": "falls with the decay (figures)"},
            tests=tuple(
                ClaimTest(arm=STRONG, outcome=f"heads/{rank}/mean", says="lower", against=STRONG_FREE) for rank in RANKS
            ),
        ),
        *(
            Claim(
                text=f"It loses rank in every layer, in the product of {words}.",
                source=f"{PAPER}, figures of the rank by layer",
                published={"rank": "falls in the layers that are shown (figures)"},
                tests=tuple(
                    ClaimTest(arm=STRONG, outcome=f"heads/{rank}/layer {layer}", says="lower", against=STRONG_FREE)
                    for layer in range(DEPTH)
                ),
            )
            for rank, words in zip(RANKS, ("values and outputs", "queries and keys"))
        ),
    ),
    scales={
        "small": Scale(seeds=10),
        # 11 million parameters: a minute a run on one GPU
        "gpu": Scale(
            settings={
                "dim": 384,
                "depth": 6,
                "heads": 6,
                "context": 256,
                "batch_size": 64,
                "steps": 2000,
                "learning_rate": 1e-3,
                "warmup": 100,
                "test_size": None,
                "dtype": "bfloat16",
            },
            seeds=6,
        ),
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
        "The summary of the paper states that decoupling can help, without a figure. The paper's models see no text "
        "twice; in 3,000 steps these see each character three to four times.",
    ),
)
