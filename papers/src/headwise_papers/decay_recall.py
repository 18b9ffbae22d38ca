"""Associative recall by attention alone: the effect of weight decay on the products of a head's weights.

Kobayashi, Akram and von Oswald 2024, arXiv 2410.23819. Under gradient flow, a decay λ makes PᵀP − W_V W_Vᵀ vanish as
e^(−2λt), and L2 on the factors equals the nuclear norm of their product. As in the paper's experiment, AdamW is used
here.
"""

from __future__ import annotations

from headwise.lab.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Premise, Scale, Study
from headwise_papers.tasks.decay_claims import (
    PAPER,
    RANK_GAPS,
    RANKS,
    RANKS_SOURCE,
    at_each_step,
    axis,
    falls,
    mean,
    ranks_fall,
)
from headwise_papers.tasks.recall import VALUES, AssociativeRecall
from headwise_verdict.results.records import ClaimKind

DECAYS = ("0", "0.03", "0.1", "0.3", "1")
AXIS = axis(*DECAYS)
DEPTH = 2
BALANCE = ("imbalance_vo", "nuclear_gap_vo", "imbalance_qk", "nuclear_gap_qk")
NONE, MODERATE = (f"baseline | attention_weight_decay={decay}" for decay in ("0", "0.3"))
# the share of training labels that are random causes a gap of 4.7 points; a tenth of it counts as no difference
GAP_MARGIN = 0.005
# of the claims up to a decay of 0.3
AFTER = f"{PAPER}; for this range"
LEARNED, MODERATE_LEARNED = "learned", "learned up to a decay of 0.3"


def _arms_learned(name: str, words: str, *decays: str) -> Premise:
    """Return the premise that the arms with these decays learned, at the level asked of the plain model."""
    levels = tuple(
        test
        for decay in decays
        for test in learned("test/accuracy", 1 / VALUES, 0.5, arm=f"baseline | attention_weight_decay={decay}").tests
    )
    text = f"With {words} too the model learned: better than the trivial predictor in test/accuracy by 0.5"
    return Premise(name=name, text=text, tests=levels)


def _lower_at_moderate(
    text: str, *outcomes: str, source: str = AFTER, margin: float | None = None, kind: ClaimKind = "figures known"
) -> Claim:
    """Return the claim that outcomes are lower at a decay of 0.3, where every seed learned, than without decay."""
    tests = tuple(
        ClaimTest(arm=MODERATE, outcome=outcome, says="lower", against=NONE, margin=margin) for outcome in outcomes
    )
    return Claim(text=text, source=source, tests=tests, needs=(LEARNED, MODERATE_LEARNED), kind=kind)


STUDY = Study(
    name="decay-recall",
    title="Weight decay of attention on associative recall",
    question="Does weight decay on attention alone lower the rank of P·W_V and W_KᵀW_Q, and make both factors balance "
    "exponentially fast?",
    task=AssociativeRecall(
        steps=420,
        batch_size=32,
        learning_rate=5e-3,
        warmup=50,
        depth=DEPTH,
        queries=20,
        weight_decay=0.1,
        attention_weight_decay=0.1,
        train_size=13_440,
        watch_statistics=(*RANKS, *BALANCE),
        watch_every=20,
        head_rates=BALANCE,
        head_statistics=(*RANKS, *BALANCE, *RANK_GAPS),
    ),
    task_place="headwise_papers.tasks.recall:AssociativeRecall",
    methods=(),
    sweeps=(AXIS,),
    watch=True,
    premises=(
        learned("test/accuracy", 1 / VALUES, 0.5),
        _arms_learned(MODERATE_LEARNED, "decays of 0, 0.03 and 0.3", "0", "0.03", "0.3"),
        _arms_learned("learned at a decay of 1", "a decay of 1", "1"),
    ),
    claims=(
        *ranks_fall(DECAYS, DEPTH),
        Claim(
            text="The stronger the decay, the faster PᵀP − W_V W_Vᵀ and the gap between Frobenius and nuclear norm "
            "vanish.",
            source=PAPER,
            tests=falls(AXIS, *(f"rates/{name}/rate" for name in BALANCE[:2])),
        ),
        Claim(
            text="At the end of training both are the smaller, the stronger the decay.",
            source=PAPER,
            tests=falls(AXIS, *mean(*BALANCE[:2])),
        ),
        _lower_at_moderate(
            "At a decay of 0.3 the pseudo-rank of a head's products is lower than without decay.", *mean(*RANKS)
        ),
        Claim(
            text="Up to a decay of 0.3 it is lower at each decay than at the one before.",
            source=f"{AFTER}; figures of ranks by decay",
            tests=at_each_step(DECAYS[:-1], *mean(*RANKS)),
            needs=(LEARNED, MODERATE_LEARNED),
            kind="figures known",
        ),
        *(
            _lower_at_moderate(
                f"At a decay of 0.3 it is lower in every layer, in the product of {product}.",
                *(f"heads/{name}/layer {layer}" for layer in range(DEPTH)),
                source=f"{AFTER}; figures of ranks by layer and product",
            )
            for name, product in zip(RANKS, ("values and outputs", "queries and keys"), strict=True)
        ),
        _lower_at_moderate(
            "At a decay of 0.3 PᵀP − W_V W_Vᵀ and the gap between Frobenius and nuclear norm vanish faster than "
            "without decay.",
            *(f"rates/{name}/rate" for name in BALANCE[:2]),
        ),
        _lower_at_moderate(
            "At a decay of 0.3 both are smaller at the end of training than without decay.", *mean(*BALANCE[:2])
        ),
        _lower_at_moderate(
            "At a decay of 0.3 the ranks of both factors' Gram matrices are nearer than without decay.",
            *mean(*RANK_GAPS),
            source=RANKS_SOURCE,
            kind="measured",
        ),
        _lower_at_moderate(
            "At a decay of 0.3 the gap of training and test accuracy is smaller than without decay.",
            "gap/accuracy",
            source="ours: whether models of lower rank generalise better",
            margin=GAP_MARGIN,
        ),
    ),
    scales={
        "small": Scale(seeds=10),
        "paper": Scale(settings={"batch_size": 128, "steps": 20_000, "train_size": None, "watch_every": 400}, seeds=5),
    },
    notes=(
        "Imbalance and gap are shares of the norms, so that weights which merely shrink do not count as balanced.",
        "e-folds: under gradient flow, a decay λ at a rate η results in −2000·ηλ per 1,000 steps. AdamW divides "
        "gradients by their size, which conserves no difference of the Gram matrices: "
        "they balance at a decay of 0 too.",
        "Width, heads, learning rate and steps of the paper's experiment are not known here; batch, pairs and labels "
        "are.",
    ),
)
