"""SigmaReparam in translation with 18 and 50 layers a side, each arm at the best of several rates.

Zhai et al. 2023 train up to 100 layers per side on WMT; this study trains a narrow transformer on Multi30k.
"""

from __future__ import annotations

from headwise.lab.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.sigma_translation import SIGMA, SMALL, SOURCE, UNIGRAM, reference, translates
from headwise_papers.tasks.translation import Translation

# 1,200 steps at 18 layers a side, one pass over the data, and 600 at 50
SETTINGS = SMALL | {"depth": 18, "learning_rate": 5e-4, "layer_steps": 21_600, "deep_layer_steps": 30_000}


def _arm(method: str, depth: int, rate: float, norm: str = "post") -> str:
    changes = {"depth": depth, "norm": norm, "learning_rate": rate}
    defaults = {"norm": "post"} | SETTINGS
    told = ", ".join(f"{name}={value}" for name, value in changes.items() if value != defaults[name])
    return f"{method} | {told}" if told else method


POST = {18: _arm("baseline", 18, 0.0005), 50: _arm("baseline", 50, 0.002)}
SIGMAS = {18: _arm(SIGMA, 18, 0.004), 50: _arm(SIGMA, 50, 0.002)}
DEEP = {18: _arm("baseline", 18, 0.004, "deep"), 50: _arm("baseline", 50, 0.002, "deep")}


def _trains(depth: int) -> Claim:
    return Claim(
        text=f"At {depth} layers a side post-LN trains better with SigmaReparam than without, each at the best rate "
        "tried.",
        source=SOURCE,
        tests=(ClaimTest(arm=SIGMAS[depth], outcome="test/loss", says="lower", against=POST[depth]),),
        needs=(f"learned at {depth} layers", *(["translates at 18 layers"] if depth == 18 else [])),
    )


STUDY = Study(
    name="sigma-translation-deep",
    title="SigmaReparam in translation with 18 and 50 layers a side",
    question="Is SigmaReparam near DeepNorm at 18 layers a side, and behind it but stable at 50, where each is trained "
    "at the best rate tried?",
    task=Translation.model_validate(SETTINGS),
    task_place="headwise_papers.tasks.translation:Translation",
    methods=(SIGMAS[18], DEEP[18], POST[50], SIGMAS[50], DEEP[50]),
    premises=(
        *(
            learned("test/loss", UNIGRAM, 0.5, arm=arm, lower=True).model_copy(
                update={"name": f"learned at {depth} layers"}
            )
            for depth, arm in DEEP.items()
        ),
        *(
            reference(
                arm, f"at {depth} layers a side its test loss is below that of post-LN", against=POST[depth]
            ).model_copy(update={"name": f"a reference at {depth} layers"})
            for depth, arm in DEEP.items()
        ),
        translates(18, DEEP[18]),
    ),
    claims=(
        Claim(
            text="At 18 layers a side post-LN with SigmaReparam is near DeepNorm, each at the best rate tried.",
            source=SOURCE,
            tests=(ClaimTest(arm=SIGMAS[18], outcome="test/loss", says="same", against=DEEP[18], margin=0.2),),
            needs=("learned at 18 layers", "a reference at 18 layers", "translates at 18 layers"),
        ),
        Claim(
            text="At 50 layers a side it is behind DeepNorm, each at the best rate tried.",
            source=SOURCE,
            tests=(ClaimTest(arm=SIGMAS[50], outcome="test/loss", says="higher", against=DEEP[50]),),
            needs=("learned at 50 layers", "a reference at 50 layers"),
        ),
        Claim(
            text="At 50 layers a side post-LN with SigmaReparam is stable: it learns more than frequencies of tokens.",
            source=SOURCE,
            tests=(ClaimTest(arm=SIGMAS[50], outcome="test/loss", says="lower", level=UNIGRAM),),
            needs=("learned at 50 layers",),
        ),
        *map(_trains, POST),
    ),
    scales={"gpu": Scale(settings=SETTINGS, seeds=6)},
    notes=(
        "The rates are the best of two to four for each arm and depth, by the loss on the same test sentences with "
        "another seed of weights and batches, after 400 steps at 18 layers and 300 at 50.",
        "18 layers a side train 1,200 steps of 500 tokens, one pass over the data; 50 layers take 600.",
        "BLEU is that of the first hundred test sentences, decoded greedily.",
        "A diverged run counts as one that guesses among all tokens.",
        "There is no paper scale: sigma-translation has one.",
    ),
)
