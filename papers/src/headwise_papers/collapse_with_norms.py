"""A study of entropy collapse in a pre-LN language model, with norms and as distinct from rank collapse.

Zhai et al. 2023, arXiv 2303.06296. Without warm-up and with a constant learning rate, each arm is trained for few steps
at every rate of a ladder.
"""

from __future__ import annotations

from typing import Any

from headwise.lab.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.rate_ladder import UNIGRAM, RateLadder
from headwise_verdict.results.records import ClaimKind, Premise

ZHAI = "Zhai et al. 2023, arXiv 2303.06296"
SIGMA, QUERIES, QKNORM = (
    'SigmaReparam(init="current", layers="all")',
    'SigmaReparam(init="current", layers="qk")',
    'QKNorm(norm="rms")',
)
CRITICAL, ENTROPY, RANK = "test/critical_rate", "health/entropy_share", "health/rank"
# a rate at which every arm learns, and one at which the plain model fails
LOW, HIGH = "rate 0.003", "rate 0.1"
WORDS = {"in words": "the abstract and the summary give no figure"}


def _claim(text: str, *tests: dict[str, Any], source: str = ZHAI, kind: ClaimKind = "measured") -> Claim:
    judged = tuple(ClaimTest.model_validate(one) for one in tests)
    return Claim(text=text, source=source, published=WORDS, tests=judged, kind=kind)


STUDY = Study(
    name="collapse-with-norms",
    title="Entropy collapse in spite of norms",
    question="Does attention's entropy collapse in a pre-LN language model at high rates, do SigmaReparam and QKNorm "
    "prevent it, and is it the same failure as rank collapse?",
    task=RateLadder(
        rates=(0.003, 0.01, 0.03, 0.1, 0.3),
        level=2.75,
        dim=64,
        depth=4,
        heads=4,
        context=128,
        batch_size=8,
        steps=80,
        test_size=100,
        weight_decay=0.0,
    ),
    task_place="headwise_papers.tasks.rate_ladder:RateLadder",
    methods=(SIGMA, QUERIES, QKNORM),
    premises=(
        learned("test/best_loss", UNIGRAM, 0.6, lower=True),
        Premise(
            name="failure arose",
            text="The plain model fails at the highest rate: its test loss lies above 2.75 nats per character",
            tests=(ClaimTest(arm="baseline", outcome="rate 0.3/test/loss", says="higher", level=2.75),),
        ),
    ),
    claims=(
        _claim(
            "The entropy of a plain pre-LN model collapses at a high rate: below a third of ln(keys), and below that "
            "at a low rate.",
            {"arm": "baseline", "outcome": f"{HIGH}/{ENTROPY}", "says": "lower", "level": 1 / 3},
            {"arm": "baseline", "outcome": f"{HIGH}/{ENTROPY}", "says": "lower", "against_outcome": f"{LOW}/{ENTROPY}"},
        ),
        _claim(
            "SigmaReparam of all weights keeps the entropy above that of the plain model at a high rate.",
            {"arm": SIGMA, "outcome": f"{HIGH}/{ENTROPY}", "says": "higher"},
        ),
        _claim(
            "SigmaReparam of queries and keys alone keeps the entropy up too: their spectral norms are what it hangs "
            "on.",
            {"arm": QUERIES, "outcome": f"{HIGH}/{ENTROPY}", "says": "higher"},
        ),
        _claim(
            "SigmaReparam of all weights bears a higher learning rate.",
            {"arm": SIGMA, "outcome": CRITICAL, "says": "higher"},
        ),
        _claim(
            "SigmaReparam of queries and keys alone bears a higher learning rate.",
            {"arm": QUERIES, "outcome": CRITICAL, "says": "higher"},
        ),
        _claim(
            "A norm on queries and keys bears a higher learning rate.",
            {"arm": QKNORM, "outcome": CRITICAL, "says": "higher"},
            source="Dehghani et al. 2023, arXiv 2302.05442",
        ),
        _claim(
            "With SigmaReparam of all weights the loss hangs less on the rate.",
            {"arm": SIGMA, "outcome": "test/sensitivity", "says": "lower"},
        ),
        _claim(
            "SigmaReparam leaves the model its capacity: its loss at its best rate is that of the plain model at its "
            "own, within 0.02 nats.",
            {"arm": SIGMA, "outcome": "test/best_loss", "says": "same", "margin": 0.02},
        ),
        _claim(
            "Entropy collapse and rank collapse are two failures: where SigmaReparam of queries and keys keeps the "
            "entropy up at a high rate, the stream loses rank all the same.",
            {"arm": QUERIES, "outcome": f"{HIGH}/{ENTROPY}", "says": "higher", "level": 0.5},
            {"arm": QUERIES, "outcome": f"{HIGH}/{RANK}", "says": "lower", "against_outcome": f"{LOW}/{RANK}"},
        ),
        _claim(
            "Entropy collapse is common in baselines: at the plain model's best rate, 0.01, its entropy is below a "
            "third of ln(keys).",
            {"arm": "baseline", "outcome": f"rate 0.01/{ENTROPY}", "says": "lower", "level": 1 / 3},
            source=f"{ZHAI}, abstract",
            kind="figures known",
        ),
    ),
    scales={
        "small": Scale(seeds=8),
        "bfloat16": Scale(settings={"dtype": "bfloat16"}, seeds=6),
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
        "A run trains one arm at every rate, each time from weights and on batches that are the same for all arms of "
        "a seed. Failed: a test loss above 2.75 nats, 0.2 above the "
        "best and 0.6 below that of the shares of characters.",
        "The paper gives figures only for its models without norms or with post-LN; that norms do not "
        "prevent the collapse is stated in words. Its largest models are far larger than the scale paper here.",
    ),
)
