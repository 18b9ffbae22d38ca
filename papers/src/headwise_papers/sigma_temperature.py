"""Temperature interventions: attention is sharpened tenfold during the training of a ViT, in its warm-up or later.

Zhai et al. 2023, arXiv 2303.06296: interventions at epochs 20, 30, 50 and 80 lower the attention entropy and cause no
instability; sharpness is related to stability. This study also asks whether a run recovers, and what an intervention
during the warm-up does.
"""

from __future__ import annotations

from headwise.lab.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.short_cifar import ShortCifar

SOURCE = "Zhai et al. 2023, arXiv 2303.06296"
EARLY, *LATE = (f"Temperature(value=1.0 -> 0.1 at {at}%)" for at in (10, 20, 30, 50, 80))

# without layer norms, near the highest learning rate at which the plain model is stable; few steps decide that
BARE = " | learning_rate=0.006, norm=none, steps=200, weight_decay=0.0"
BARE_PLAIN, BARE_EARLY, BARE_LATE = (f"{arm}{BARE}" for arm in ("baseline", EARLY, LATE[-1]))


def each(outcome: str, says: str, arms: list[str], **more: float) -> tuple[ClaimTest, ...]:
    """Return the same test for several arms."""
    return tuple(ClaimTest.model_validate({"arm": arm, "outcome": outcome, "says": says} | more) for arm in arms)


STUDY = Study(
    name="sigma-temperature",
    title="Temperature interventions: entropy, sharpness and divergence",
    question="When the temperature of attention falls from 1 to 0.1, do entropy and sharpness move together, does a "
    "run in its warm-up diverge, and does a later one stay stable and recover?",
    task=ShortCifar(
        dim=48,
        depth=4,
        heads=3,
        mlp_dim=96,
        steps=2000,
        train_size=None,
        warmup=0.2,
        learning_rate=3e-3,
        watch_every=100,
        watch_examples=32,
        watch_statistics=("attention_entropy", "sharpness", "sharpness_share"),
    ),
    task_place="headwise_papers.tasks.short_cifar:ShortCifar",
    methods=(EARLY, *LATE, BARE_PLAIN, BARE_EARLY, BARE_LATE),
    watch=True,
    margin=0.02,
    seeds=8,
    premises=(learned("test/accuracy", 0.1, 0.1), learned("test/accuracy", 0.1, 0.1, arm=BARE_PLAIN)),
    claims=(
        Claim(
            text="A lower temperature lowers the attention entropy.",
            source=f"{SOURCE}; true by construction: a lower temperature sharpens every map",
            tests=each("watched/attention_entropy/least", "lower", [EARLY, *LATE]),
            kind="by construction",
        ),
        Claim(
            text="Where the entropy falls the sharpness rises beyond the optimizer's threshold of stability.",
            source=SOURCE,
            # 1 in a run whose sharpness exceeded the threshold: in more than half of the runs
            tests=each("watched/sharpness_share/beyond", "higher", [EARLY, *LATE], level=0.5),
        ),
        Claim(
            text="Interventions at 20, 30, 50 and 80 % of training cause no instability.",
            source=SOURCE,
            # divergence of fewer than half of the runs counts as none
            tests=each("diverged", "same", LATE, margin=0.5),
        ),
        Claim(
            text="An intervention in the warm-up ends in divergence.",
            source="ours: the source intervenes behind its warm-up",
            # divergence of fewer than half of the runs counts as none
            tests=each("diverged", "higher", [EARLY], margin=0.5),
        ),
        Claim(
            text="After an intervention behind the warm-up the model becomes as accurate as the plain one.",
            source="ours: the source says of them that they cause no instability",
            tests=each("test/accuracy", "same", LATE),
        ),
        Claim(
            text="After an intervention behind the warm-up the attention entropy rises again, by 0.1 nats and more.",
            source="ours: from the lowest reading, which follows the intervention, to the last; as the last is never "
            "below the lowest, the question is whether the rise exceeds 0.1 nats",
            tests=tuple(
                ClaimTest(
                    arm=arm,
                    outcome="watched/attention_entropy/last",
                    says="higher",
                    against=arm,
                    against_outcome="watched/attention_entropy/least",
                    by=0.1,
                )
                for arm in LATE
            ),
        ),
        Claim(
            text="Without layer norms an intervention in the warm-up ends in divergence, and one at 80 % of training "
            "does not.",
            source="ours: at the same size, where training is less stable",
            tests=(
                ClaimTest(arm=BARE_EARLY, outcome="diverged", says="higher", against=BARE_PLAIN),
                ClaimTest(arm=BARE_LATE, outcome="diverged", says="lower", against=BARE_EARLY),
            ),
        ),
    ),
    scales={
        "small": Scale(settings={"depth": 4}, seeds=8),
        "paper": Scale(
            settings={
                "dim": 768,
                "depth": 12,
                "heads": 12,
                "head_dim": 64,
                "mlp_dim": 3072,
                "patch": 4,
                "batch_size": 256,
            }
            | {"steps": None, "epochs": 100, "train_size": None, "test_size": None, "watch_every": 500},
            seeds=3,
        ),
    },
    notes=(
        "The warm-up takes the first fifth of the steps; the intervention at 10 % is in its middle, the one at 20 % "
        "at its end. Shares are those of the paper's hundred epochs.",
        "Sharpness: the largest eigenvalue of the training loss's Hessian on a fixed batch, by Lanczos. Its share is "
        "the preconditioned sharpness over Adam's threshold, 38 / learning rate (Cohen et al. 2022, arXiv "
        "2207.14484): above 1 steps on such a quadratic grow.",
        "The paper trains ViT-B on ImageNet; CIFAR-10 replaces it here, at the paper's scale with the shape of ViT-B.",
    ),
)
