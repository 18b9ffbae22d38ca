"""Associative recall by attention alone: the effect of weight decay on the products of a head's weights.

Kobayashi, Akram and von Oswald 2024, arXiv 2410.23819. Under gradient flow, a decay λ makes PᵀP − W_V W_Vᵀ vanish as
e^(−2λt), and L2 on the factors equals the nuclear norm of their product. As in the paper's experiment, AdamW is used
here.
"""

from __future__ import annotations

from headwise.experiments.premises import learned
from headwise.study import Claim, Scale, Study
from headwise_papers.tasks.decay_claims import PAPER, RANKS, axis, falls, mean, ranks_fall
from headwise_papers.tasks.recall import VALUES, AssociativeRecall

DECAYS = ("0", "0.03", "0.1", "0.3", "1")
AXIS = axis(*DECAYS)
DEPTH = 2
BALANCE = ("imbalance_vo", "nuclear_gap_vo", "imbalance_qk", "nuclear_gap_qk")

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
        head_statistics=(*RANKS, *BALANCE),
    ),
    task_place="headwise_papers.tasks.recall:AssociativeRecall",
    methods=(),
    sweeps=(AXIS,),
    watch=True,
    premises=(learned("test/accuracy", 1 / VALUES, 0.5),),
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
