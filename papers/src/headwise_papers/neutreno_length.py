"""NeuTRENO and FeatScale at several lengths of training: do they regularize, or do they learn faster?"""

from __future__ import annotations

from headwise.lab.experiments.premises import learned, parameters_moved
from headwise.study import Claim, ClaimTest, Evaluation, Premise, Scale, Study
from headwise_papers.tasks.deit import PUBLISHED, DeiT

SHORT, MIDDLE, LONG, LONGEST = 100, 400, 1200, 6000
PAPER = "Nguyen et al. 2023, arXiv 2312.00751"
OURS = "our own question"
# its gains start at 0, where it changes nothing
FEATSCALE = "FeatScale()"
FAST = f"{FEATSCALE} | method_rate=10.0"
STRONG, WEAK = "NeuTRENO(strength=0.6)", "NeuTRENO(strength=0.2)"
AXES = (
    *(f"{arm} | steps={{{SHORT},{MIDDLE},{LONG},{LONGEST}}}" for arm in ("baseline", STRONG)),
    *(f"{arm} | steps={{{SHORT},{MIDDLE},{LONG}}}" for arm in (WEAK, FEATSCALE)),
)
TOP1, GAP, COSINE = "test/accuracy", "gap/accuracy", "heads/final_cosine/mean"


class MeasuredDeiT(DeiT):
    """Classification of CIFAR-10 as in the other studies of NeuTRENO, with an evaluation on training images."""

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations, with 2,000 training images, which are all at the scale small."""
        return [Evaluation("train", limit=2000)]


def at(arm: str, steps: int) -> str:
    """Return an arm with a length of training."""
    if arm == "baseline" and steps == MIDDLE:
        return arm
    return f"{arm}{', ' if '|' in arm else ' | '}steps={steps}"


def compared(text: str, arm: str, outcome: str, says: str, steps: int, *, source: str, **more: object) -> Claim:
    """Return the claim that an arm differs from the plain model at the same length of training."""
    published = more.pop("published", {"effect": "not published"})
    needs = [LEARNED.name]
    if arm in MOVED:
        needs.append(MOVED[arm].name)
    if (outcome, steps) == (GAP, LONGEST):
        needs.append(OVERFITS.name)
    test = {"arm": at(arm, steps), "outcome": outcome, "says": says, "against": at("baseline", steps), **more}
    return Claim(
        text=text, source=source, published=published, tests=(ClaimTest.model_validate(test),), needs=tuple(needs)
    )


LEARNED = learned(TOP1, 0.1, 0.1)
MOVED = {FEATSCALE: parameters_moved(at(FEATSCALE, LONG)), FAST: parameters_moved(at(FAST, LONG), 0.1)}
OVERFITS = Premise(
    name="overfits",
    text=f"The plain model overfits: its train − test accuracy is above 20 points after {LONGEST} steps",
    tests=(ClaimTest(arm=at("baseline", LONGEST), outcome=GAP, says="higher", level=0.2),),
)
# the gains of NeuTRENO and of FeatScale in the paper's Table 1
HIGHER = {"published": {"top-1": "72.17 → 73.01 (ImageNet, 300 epochs)"}, "effect": 0.0084}
SCALED = {"published": {"top-1": "72.17 → 72.346 (ImageNet, 300 epochs)"}, "effect": 0.0018}

STUDY = Study(
    name="neutreno-length",
    title="NeuTRENO and the length of training",
    question="Does NeuTRENO keep its gain as training gets longer, and does it come from regularizing or from "
    "learning faster?",
    task=MeasuredDeiT(
        dim=48,
        mlp_dim=96,
        depth=8,
        patch=8,
        steps=MIDDLE,
        batch_size=16,
        learning_rate=2e-3,
        schedule="cosine",
        warmup=0.1,
        train_size=2000,
        test_size=2000,
        head_statistics=("final_cosine",),
    ),
    task_place="headwise_papers.neutreno_length:MeasuredDeiT",
    methods=(at(FAST, LONG),),
    sweeps=AXES,
    premises=(LEARNED, *MOVED.values(), OVERFITS),
    claims=(
        compared(f"NeuTRENO is more accurate after {SHORT} steps.", STRONG, TOP1, "higher", SHORT, source=OURS),
        compared(
            f"NeuTRENO is more accurate after {LONG} steps.",
            STRONG,
            TOP1,
            "higher",
            LONG,
            source=f"{PAPER}, Table 1",
            **HIGHER,
        ),
        compared(
            f"At the weaker strength 0.2 NeuTRENO is more accurate after {LONG} steps.",
            WEAK,
            TOP1,
            "higher",
            LONG,
            source=OURS,
        ),
        compared(
            f"NeuTRENO learns faster: its training loss is lower after {SHORT} steps.",
            STRONG,
            "train/loss",
            "lower",
            SHORT,
            source=OURS,
        ),
        compared(
            f"NeuTRENO learns faster: its training loss is lower after {LONG} steps.",
            STRONG,
            "train/loss",
            "lower",
            LONG,
            source=OURS,
        ),
        compared(
            f"NeuTRENO regularizes: train − test accuracy is smaller after {LONG} steps.",
            STRONG,
            GAP,
            "lower",
            LONG,
            source=OURS,
        ),
        compared(f"NeuTRENO is more accurate after {LONGEST} steps.", STRONG, TOP1, "higher", LONGEST, source=OURS),
        compared(
            f"NeuTRENO learns faster: its training loss is lower after {LONGEST} steps.",
            STRONG,
            "train/loss",
            "lower",
            LONGEST,
            source=OURS,
        ),
        compared(
            f"NeuTRENO regularizes: train − test accuracy is smaller after {LONGEST} steps.",
            STRONG,
            GAP,
            "lower",
            LONGEST,
            source=OURS,
        ),
        compared(
            f"NeuTRENO keeps the tokens less alike after {LONGEST} steps.",
            STRONG,
            COSINE,
            "lower",
            LONGEST,
            source=OURS,
        ),
        compared(
            f"FeatScale, whose gains have had time to learn, is more accurate after {LONG} steps.",
            FEATSCALE,
            TOP1,
            "higher",
            LONG,
            source=f"{PAPER}, Table 1",
            **SCALED,
        ),
        compared(
            f"FeatScale whose gains learn ten times as fast is more accurate after {LONG} steps.",
            FAST,
            TOP1,
            "higher",
            LONG,
            source=f"{PAPER}, Table 1",
            **SCALED,
        ),
        Claim(
            text=f"NeuTRENO keeps the tokens less alike at every length, {SHORT} to {LONG} steps.",
            source=f"{PAPER}, Fig. 1",
            published={"cosine": "significantly lower (a figure)"},
            tests=tuple(
                ClaimTest(arm=at(STRONG, steps), outcome=COSINE, says="lower", against=at("baseline", steps))
                for steps in (SHORT, MIDDLE, LONG)
            ),
            needs=(LEARNED.name,),
        ),
    ),
    scales={"small": Scale(seeds=8), "paper": Scale(settings=PUBLISHED, seeds=5)},
    notes=(
        f"Each length has its own cosine schedule. {SHORT} steps of 16 see most of the 2,000 training images once, "
        f"{LONG} steps each nearly ten times, {LONGEST} steps 48 times.",
        "The paper trains for 300 epochs of ImageNet and does not vary the length. At the scale paper the lengths of "
        "the arms are those written here, which its batches make longer.",
    ),
)
