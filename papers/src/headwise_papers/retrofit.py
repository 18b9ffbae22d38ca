"""A study of which methods can be added to a model trained without them: at once, with a warm-up, or not at all."""

from __future__ import annotations

from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.story_teller import SWITCHED_ON, StoryTeller
from headwise_verdict.results.records import ClaimKind, Premise

OWN = "a question of this project's own"
START, END, RISE = f"{SWITCHED_ON}/stories/loss", "test/loss", "int8/rise"
# loss on the test windows before any step, in nats per token
LOADED = 5.08
# margins in nats per token: before any step, after fine-tuning, and after the rounding of weights
KEPT, MARGIN, ROUNDING = 0.005, 0.03, 0.005
# the sum of the learning rates of a fine-tuning, about the farthest that AdamW can move a parameter
TRAVEL = 0.0155
WARM = "over 50%"

# methods that act only in training and leave evaluation unchanged by construction; one represents all
IN_TRAINING = ("DropHead(p=0.2)",)
# methods that equal the plain layer at their initial values
NEUTRAL = (
    "AttnScale()",
    'GatedOutput(per="head", start="one")',
    "InterleavedHeads(values=True)",
    "LayerScale(start=1.0)",
    'SigmaReparam(init="current")',
    'WeightNorm(init="current")',
    "XSA(strength=1.0, learned=True)",
)
# gates and gains with the initial value 1
GATES = ('GatedOutput(per="head", start="one")', "LayerScale(start=1.0)", 'SigmaReparam(init="current")')
# methods that change what the model computes
CHANGING = (
    "AttentionSink(logit=0.0)",
    "ContraNorm(strength=0.1)",
    "DifferentialAttention(start=None)",
    "ForgettingAttention(bias=0.0)",
    "LinearAttention()",
    "NeuTRENO(strength=0.6)",
    'QKNorm(norm="rms")',
    'ReAttention(norm="batch")',
    "SSMax(scale=0.43)",
    "SoftCap(cap=50.0)",
    'SymmetricAttention(keep="queries")',
    "ValueResidual(mix=0.5)",
    "XSA(strength=1.0)",
)
# methods run both at once and with a strength that grows over the first half of the fine-tuning
WARMED = {
    "ContraNorm(strength=0.1)": f"ContraNorm(strength=0.0 -> 0.1 {WARM})",
    "DropHead(p=0.2)": f"DropHead(p=0.0 -> 0.2 {WARM})",
    "NeuTRENO(strength=0.6)": f"NeuTRENO(strength=0.0 -> 0.6 {WARM})",
    "ValueResidual(mix=0.5)": f"ValueResidual(mix=0.0 -> 0.5 {WARM})",
    "XSA(strength=1.0)": f"XSA(strength=0.0 -> 1.0 {WARM})",
}
# those of them that also act in evaluation
ACTING = tuple(arm for arm in WARMED if arm in CHANGING)
METHODS = (*IN_TRAINING, *NEUTRAL, *CHANGING)


def _name(arm: str) -> str:
    return arm.partition("(")[0]


def _same(text: str, arms: tuple[str, ...], outcome: str, margin: float, kind: ClaimKind = "measured") -> Claim:
    """Return the claim that arms equal the plain model within a margin."""
    tests = tuple(ClaimTest(arm=arm, outcome=outcome, says="same", margin=margin) for arm in arms)
    return Claim(text=text, source=OWN, tests=tests, kind=kind)


def _no_worse(text: str, arms: tuple[str, ...], outcome: str, most: float) -> Claim:
    """Return the claim that arms are higher than the plain model by less than `most`; they may be lower."""
    tests = tuple(ClaimTest(arm=arm, outcome=outcome, says="lower", by=-most) for arm in arms)
    return Claim(text=text, source=OWN, tests=tests)


STUDY = Study(
    name="retrofit",
    title="Methods switched on in a trained model",
    question="Which methods may enter a language model that was trained without them, at once or behind a warm-up, and "
    "does what they bring along ever move?",
    task=StoryTeller(
        steps=30,
        batch_size=4,
        learning_rate=1e-3,
        warmup=4,
        schedule="cosine",
        weight_decay=0.0,
        clip=1.0,
        test_size=64,
        evaluation_batch_size=64,
    ),
    task_place="headwise_papers.tasks.story_teller:StoryTeller",
    methods=(*METHODS, *WARMED.values()),
    margin=MARGIN,
    premises=(
        Premise(
            name="fine-tuning learns",
            text=f"Fine-tuning lowers the plain model's loss by 0.5 nats, from {LOADED}",
            tests=(ClaimTest(arm="baseline", outcome=END, says="lower", level=LOADED - 0.5),),
        ),
    ),
    claims=(
        _same(
            "DropHead, which acts in training alone, leaves the loss of a trained model as it is.",
            IN_TRAINING,
            START,
            KEPT,
            kind="by construction",
        ),
        _same("So do methods that start at the plain layer.", NEUTRAL, START, KEPT, kind="by construction"),
        *(
            Claim(
                text=f"What {_name(gate)} brings along, which starts at a factor of 1, moves in fine-tuning, by a "
                "fifth of the sum of the learning rates.",
                source=OWN,
                tests=(ClaimTest(arm=gate, outcome="own/moved", says="higher", level=TRAVEL / 5),),
            )
            for gate in GATES
        ),
        Claim(
            text="It matters that gates moved: put back to 1, the loss rises by 0.005 nats.",
            source=OWN,
            tests=tuple(ClaimTest(arm=gate, outcome="reset/worth", says="higher", level=0.005) for gate in GATES),
        ),
        _no_worse(
            "Methods that start at the plain layer are fine-tuned as well as the plain model.", NEUTRAL, END, MARGIN
        ),
        *(
            Claim(
                text=f"{_name(arm)} is fine-tuned to a lower loss behind a warm-up of its strength than at once.",
                source=OWN,
                tests=(ClaimTest(arm=WARMED[arm], outcome=END, says="lower", against=arm),),
            )
            for arm in ACTING
        ),
        *(
            _no_worse(
                f"Behind a warm-up {_name(arm)} is fine-tuned as well as the plain model.", (WARMED[arm],), END, MARGIN
            )
            for arm in ACTING
        ),
        _no_worse("8-bit weights cost no more with methods that start at the plain layer.", NEUTRAL, RISE, ROUNDING),
        _no_worse("8-bit weights cost no more with methods that change what is computed.", CHANGING, RISE, ROUNDING),
    ),
    scales={
        "small": Scale(seeds=6),
        "paper": Scale(settings={"steps": 1000, "batch_size": 32, "test_size": None, "context": 256}, seeds=6),
    },
    notes=(
        "The model is stories260K of llama2.c: 5 layers, 8 heads that share 4 keys and values, 260,000 weights, "
        "trained on small stories. It is fine-tuned on tiny Shakespeare in its own 512 tokens.",
        "A warm-up raises a method's strength from 0 over the first half of the fine-tuning; its loss "
        "when switched on is that of the full strength. Before the first step all seeds have the same weights, so "
        "that figures at the switch have no spread.",
        "8 bits: every row of the linear layers' weights, and of the embedding, is rounded to multiples, up to 127, "
        "of its own scale; activations, and parameters that methods add outside of such layers, are not rounded.",
    ),
)
