"""A study of stability: AdamW and Muon, plain and with four remedies for large logits, at rising learning rates."""

from __future__ import annotations

from headwise.lab.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.rate_ladder import UNIGRAM, RateLadder
from headwise_verdict.results.records import Premise

MUON = "baseline | optimizer=muon"
CRITICAL, BEST, SENSITIVITY = "test/critical_rate", "test/best_loss", "test/sensitivity"
SIGMA = 'SigmaReparam(init="current", layers="all")'
# each remedy at the settings of its source, and the source
REMEDIES = {
    'QKNorm(norm="rms")': "Wortsman et al. 2023, arXiv 2309.14322",
    "QKClip(threshold=100.0)": "Kimi K2, Moonshot AI 2025, arXiv 2507.20534",
    SIGMA: "Zhai et al. 2023, arXiv 2303.06296",
    "SoftCap(cap=50.0)": "Gemma 2, arXiv 2408.00118",
}
FAILS = "rate 0.3/test/loss"
LOGITS = "rate 0.01/health/max_logit"
# the highest of the plain model's best rates
LOGITS_AT_BEST = "rate 0.03/health/max_logit"
# the premises of all claims but the one on logits
PREMISES = ("learned", "failure arose")


def _under_muon(remedy: str) -> str:
    return f"{remedy} | optimizer=muon"


def _name(remedy: str) -> str:
    return remedy.partition("(")[0]


def _higher(remedy: str, source: str) -> tuple[Claim, Claim]:
    """Return the claims, one per optimizer, that a remedy raises the critical learning rate."""
    return tuple(  # type: ignore[return-value]  # two of them
        Claim(
            text=f"Under {optimizer} a model with {_name(remedy)} bears a higher learning rate than the plain one.",
            source=source,
            published={"critical rate": "not published for this model"},
            tests=(ClaimTest(arm=arm, outcome=CRITICAL, says="higher", against=plain),),
            needs=PREMISES,
        )
        for optimizer, arm, plain in (("AdamW", remedy, "baseline"), ("Muon", _under_muon(remedy), MUON))
    )


STUDY = Study(
    name="stability-map",
    title="A map of stability: optimizers, remedies and learning rates",
    question="How high a learning rate does a small language model bear under AdamW and under Muon, plain and with "
    "each remedy for large logits, and what does each cost at its best rate?",
    task=RateLadder(
        rates=(0.003, 0.01, 0.03, 0.1, 0.3),
        level=2.75,
        dim=32,
        depth=3,
        heads=2,
        context=32,
        batch_size=16,
        steps=120,
        test_size=400,
        weight_decay=0.0,
    ),
    task_place="headwise_papers.tasks.rate_ladder:RateLadder",
    methods=(*REMEDIES, MUON, *map(_under_muon, REMEDIES)),
    premises=(
        learned("test/best_loss", UNIGRAM, 0.6, lower=True),
        learned("test/best_loss", UNIGRAM, 0.6, arm=MUON, lower=True),
        Premise(
            name="failure arose",
            text="Both plain models fail at the highest rate: their test loss lies above 2.75 nats per character",
            tests=tuple(ClaimTest(arm=arm, outcome=FAILS, says="higher", level=2.75) for arm in ("baseline", MUON)),
        ),
        Premise(
            name="logits grow",
            text="Logits grow as in the source: at the rate 0.01 the largest under Muon is above 100, the threshold of "
            "QK-Clip; added on 2026-11-26, after the runs",
            tests=(ClaimTest(arm=MUON, outcome=LOGITS, says="higher", level=100.0),),
        ),
        Premise(
            name="QKClip acts",
            text="QKClip acts at the best rate: at 0.03, the highest of the plain model's best rates, its largest "
            "logit is above 100; added on 2026-11-27, after the runs",
            tests=(ClaimTest(arm="baseline", outcome=LOGITS_AT_BEST, says="higher", level=100.0),),
        ),
    ),
    claims=(
        *(claim for remedy, source in REMEDIES.items() for claim in _higher(remedy, source)),
        Claim(
            text="A norm on queries and keys makes the loss hang less on the rate, under AdamW.",
            source="Wortsman et al. 2023, arXiv 2309.14322",
            published={"sensitivity": "lower (figures)"},
            tests=(ClaimTest(arm='QKNorm(norm="rms")', outcome=SENSITIVITY, says="lower"),),
            needs=PREMISES,
        ),
        Claim(
            text="At its own best rate Muon reaches a lower loss than AdamW at its own.",
            source="Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982",
            published={"loss": "as AdamW's with about half of the operations (large models)"},
            tests=(ClaimTest(arm=MUON, outcome=BEST, says="lower"),),
            needs=PREMISES,
        ),
        Claim(
            text="Under Muon logits grow larger than under AdamW, at a rate that both bear.",
            source="Kimi K2, Moonshot AI 2025, arXiv 2507.20534",
            published={"largest logit": "beyond 1,000 under Muon (a figure, a large model)"},
            tests=(ClaimTest(arm=MUON, outcome=LOGITS, says="higher"),),
            needs=(*PREMISES, "logits grow"),
        ),
        Claim(
            text="SigmaReparam wants a higher rate: its best is above that of the plain model, under AdamW.",
            source="ours; the searches of other studies suggest it; eight of the twelve seeds were known",
            kind="figures known",
            tests=(ClaimTest(arm=SIGMA, outcome="test/best_rate", says="higher"),),
            needs=PREMISES,
        ),
        Claim(
            text="Entropy collapse is common in baselines: at 0.03, the highest of the best rates, the plain model's "
            "entropy is below a third of ln(keys), under AdamW and under Muon.",
            source="Zhai et al. 2023, arXiv 2303.06296, abstract",
            tests=tuple(
                ClaimTest(arm=plain, outcome="rate 0.03/health/entropy_share", says="lower", level=1 / 3)
                for plain in ("baseline", MUON)
            ),
            needs=PREMISES,
            kind="figures known",
        ),
        *(
            Claim(
                text=f"{_name(remedy)} costs nothing at the best rate: the loss is that of the plain model within "
                "0.02 nats, under AdamW.",
                source=source,
                published={"loss": "as good (in words)"},
                tests=(ClaimTest(arm=remedy, outcome=BEST, says="same", margin=0.02),),
                needs=(*PREMISES, *(["QKClip acts"] if remedy.startswith("QKClip") else [])),
            )
            for remedy, source in REMEDIES.items()
        ),
    ),
    scales={
        "small": Scale(seeds=12),
        "paper": Scale(
            settings={
                "dim": 512,
                "depth": 8,
                "heads": 8,
                "context": 512,
                "batch_size": 64,
                "steps": 2000,
                "test_size": None,
                "dtype": "bfloat16",
            },
            seeds=5,
        ),
    },
    notes=(
        "Muon moves the matrices of attention and of the MLPs, AdamW everything else: embeddings, positions, the "
        "head, norms, biases and the "
        "gains of methods. Muon's steps are scaled to the root mean square of AdamW's, so that both use one ladder.",
        "A run trains one arm at every rate without warm-up, each time from weights and on batches that are the same "
        "for all arms of a seed. Failed: a test loss above 2.75 nats.",
        "The remedies use the settings of their sources. A threshold of 100 or a cap of 50, intended for large "
        "models, acts only at high rates here.",
    ),
)
