"""SigmaReparam in translation, compared with DeepNorm at 6, 18 and 50 layers per side.

Zhai et al. 2023 train up to 100 layers per side on WMT; this study trains a narrow transformer on Multi30k.
"""

from __future__ import annotations

from headwise.lab.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Premise, Scale, Study
from headwise_papers.tasks.translation import Translation

SOURCE = "Zhai et al. 2023, arXiv 2303.06296, machine translation"
SIGMA = 'SigmaReparam(init="one", layers="all")'
SMALL = {
    "dim": 64,
    "depth": 6,
    "heads": 4,
    "mlp_dim": 128,
    "vocabulary": 2000,
    "label_smoothing": 0.1,
    "translated": 100,
    "test_size": 150,
    "tokens_per_batch": 500,
    "optimizer": "adam",
    "betas": (0.9, 0.98),
    "learning_rate": 2e-3,
    "weight_decay": 0.0,
    "warmup": 0.1,
    "schedule": "linear",
    # all arms of a depth take equally many steps, deeper ones fewer: 1,200 at 6 layers, 400 at 18, and 24 at 50, where
    # only divergence is tested
    "layer_steps": 7200,
    "deep_layer_steps": 1200,
    "divergence_factor": 1.5,
    "divergence_smoothing": 0.8,
    "head_statistics": ("attention_entropy",),
}
# the base model and recipe of Vaswani et al. 2017, with as many steps as Multi30k needs
PAPER = {
    "dim": 512,
    "heads": 8,
    "mlp_dim": 2048,
    "vocabulary": 10_000,
    "dropout": 0.1,
    "translated": None,
    "test_size": None,
    "tokens_per_batch": 16_000,
    "learning_rate": 7e-4,
    "warmup": 4000,
    "schedule": "inverse_sqrt",
    "layer_steps": None,
    "deep_layer_steps": None,
    "steps": 20_000,
    "divergence_smoothing": 0.95,
    "dtype": "bfloat16",
}
DEEP = (18, 50)
# loss in nats per English test token of a model that knows only the tokens' frequencies
UNIGRAM = 5.646


def arm(depth: int = 6, norm: str = "post", *, sigma: bool = False) -> str:
    """Return the arm of a depth and a norm; the baseline is post-LN with 6 layers per side."""
    changes = [f"depth={depth}"] * (depth in DEEP) + [f"norm={norm}"] * (norm != "post")
    return (SIGMA if sigma else "baseline") + (f" | {', '.join(changes)}" if changes else "")


def near(depth: int, margin: float, outcome: str = "test/loss") -> ClaimTest:
    """Return the test that SigmaReparam on post-LN equals DeepNorm within `margin` (nats per token, or BLEU)."""
    return ClaimTest(
        arm=arm(depth, sigma=True), outcome=outcome, says="same", against=arm(depth, "deep"), margin=margin
    )


def reference(deep: str, text: str, against: str = "baseline") -> Premise:
    """Return the premise that DeepNorm is a model to be matched: its test loss is below that of post-LN."""
    tests = (ClaimTest(arm=deep, outcome="test/loss", says="lower", against=against),)
    return Premise(name="a reference", text=f"DeepNorm is a model to be matched: {text}", tests=tests)


def translates(depth: int, deep: str) -> Premise:
    """Return the premise that DeepNorm translates: half the BLEU that post-LN reaches with 6 layers a side, 19.7."""
    return Premise(
        name=f"translates at {depth} layers",
        text=f"DeepNorm translates at {depth} layers a side: its BLEU is above 10, half of what post-LN reaches at 6 "
        "layers; added on 2026-11-26, after the runs",
        tests=(ClaimTest(arm=deep, outcome="test/greedy/bleu", says="higher", level=0.1),),
    )


STUDY = Study(
    name="sigma-translation",
    title="SigmaReparam in translation",
    question="Is SigmaReparam as good as DeepNorm at 6 layers a side, near it at 18, and behind it but stable at 50?",
    task=Translation.model_validate(SMALL),
    task_place="headwise_papers.tasks.translation:Translation",
    methods=(
        arm(sigma=True),
        arm(norm="deep"),
        arm(norm="deep", sigma=True),
        *(one for depth in DEEP for one in (arm(depth), arm(depth, sigma=True), arm(depth, "deep"))),
    ),
    scales={"small": Scale(settings=SMALL, seeds=6), "paper": Scale(settings=SMALL | PAPER, seeds=3)},
    premises=(
        *(
            learned("test/loss", UNIGRAM, 0.5, arm=arm(depth, "deep"), lower=True).model_copy(
                update={"name": f"learned at {depth} layers"}
            )
            for depth in (6, *DEEP)
        ),
        *(
            reference(
                arm(depth, "deep"),
                f"at {depth} layers a side its test loss is below that of post-LN; stated after the results had been "
                "seen",
                against=arm(depth),
            ).model_copy(update={"name": f"a reference at {depth} layers"})
            for depth in (6, *DEEP)
        ),
        # at 50 layers "learned" fails already
        translates(18, arm(18, "deep")),
    ),
    claims=(
        Claim(
            text="At 6 layers a side, post-LN with SigmaReparam is as good as DeepNorm.",
            source=SOURCE,
            tests=(near(6, 0.05), near(6, 0.02, "test/greedy/bleu")),
            needs=("learned at 6 layers", "a reference at 6 layers"),
        ),
        Claim(
            text="At 18 layers a side it is near DeepNorm.",
            source=SOURCE,
            tests=(near(18, 0.2),),
            needs=("learned at 18 layers", "a reference at 18 layers", "translates at 18 layers"),
        ),
        Claim(
            text="At 50 layers a side it is behind DeepNorm.",
            source=SOURCE,
            tests=(ClaimTest(arm=arm(50, sigma=True), outcome="test/loss", says="higher", against=arm(50, "deep")),),
            needs=("learned at 50 layers", "a reference at 50 layers"),
        ),
        *(
            Claim(
                text=f"At {depth} layers a side post-LN trains better with SigmaReparam than without.",
                source=f"{SOURCE}; judged apart from the other depth after the results had been seen",
                tests=(ClaimTest(arm=arm(depth, sigma=True), outcome="test/loss", says="lower", against=arm(depth)),),
                needs=(f"learned at {depth} layers", *(["translates at 18 layers"] if depth == 18 else [])),
            )
            for depth in DEEP
        ),
        Claim(
            text="At 50 layers a side post-LN diverges more often without SigmaReparam than with it.",
            source="ours: the source says that entropy collapse is resolved in deep models",
            tests=(ClaimTest(arm=arm(50, sigma=True), outcome="diverged", says="lower", against=arm(50)),),
            # divergence is tested whether or not the models learned
            needs=(),
        ),
    ),
    notes=(
        "The paper reports BLEU after a whole training on WMT. At the scale `small` models of 6 layers per side see "
        "their data once and translate; those of 18 see a third of it, those of 50 one fiftieth: their claims "
        "are judged by the test loss, in nats per token, those of 18 layers if DeepNorm translates.",
        "BLEU is that of the first hundred test sentences, decoded greedily.",
        "Byte pairs are trained on the training text of both languages; source, target and output share one "
        "embedding, which no "
        "method changes. Every pair is used; a sentence of more than `longest` tokens raises an error with its line.",
        "A diverged run counts as one that guesses among all tokens.",
        "WMT is not among the loaders: the scale `paper` trains the base transformer on Multi30k. It was not run.",
    ),
)
