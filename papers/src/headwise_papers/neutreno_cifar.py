"""NeuTRENO in image classification: accuracy, and the tokens, J and attention maps of trained models by depth."""

from __future__ import annotations

from headwise.lab.experiments.premises import learned, parameters_moved
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.deit import PUBLISHED, SMALL, DeiT

NEUTRENO, FEATSCALE = "NeuTRENO(strength=0.6)", "FeatScale()"
BOTH = f"{NEUTRENO} + {FEATSCALE}"
# gains that learn ten times as fast as the model
FAST, FAST_BOTH = (f"{arm} | method_rate=10.0" for arm in (FEATSCALE, BOTH))
SYMMETRIC = 'SymmetricAttention(keep="keys")'
SYMMETRIC_BOTH = f"{SYMMETRIC} + {NEUTRENO}"
# the trained plain model after a third as many further steps: with the method switched on over their first fifth, and
# without it
ADAPTED, LONGER = "NeuTRENO(strength=0.0 -> 0.6 over 20%) | adapt=true", "baseline | adapt=true"
TOP1, TOP5 = "test/accuracy", "test/top5"
PAPER = "Nguyen et al. 2023, arXiv 2312.00751"


LEARNED = learned("test/accuracy", 0.1, 0.1)
# FeatScale's gains start at 0, where it changes nothing
MOVED = {arm: parameters_moved(arm) for arm in (FEATSCALE, BOTH, FAST, FAST_BOTH)}


def _gain(
    text: str, arm: str, against: str, published: tuple[str, str], effects: tuple[float | None, ...], where: str
) -> Claim:
    """Return the claim that an arm is more accurate than another, in top-1 and top-5."""
    tests = [
        ClaimTest(arm=arm, outcome=outcome, says="higher", against=against, effect=effect)
        for outcome, effect in zip((TOP1, TOP5), effects)
    ]
    moved = [MOVED[one].name for one in (arm, against) if one in MOVED]
    return Claim(
        text=text,
        source=f"{PAPER}, {where}",
        published=dict(zip(("top-1", "top-5"), published)),
        tests=tuple(tests),
        needs=(LEARNED.name, *moved),
    )


CLAIMS = (
    _gain(
        "NeuTRENO raises the accuracy of a softmax transformer.",
        NEUTRENO,
        "baseline",
        ("72.17 → 73.01 (ImageNet)", "91.02 → 91.56"),
        (0.0084, 0.0054),
        "Table 1",
    ),
    _gain(
        "FeatScale raises the accuracy of a softmax transformer.",
        FEATSCALE,
        "baseline",
        ("72.17 → 72.346 (ImageNet)", "91.02 → 91.22"),
        (0.0018, 0.0020),
        "Table 1",
    ),
    _gain(
        "NeuTRENO raises it more than FeatScale.",
        NEUTRENO,
        FEATSCALE,
        ("72.346 against 73.01 (ImageNet)", "91.22 against 91.56"),
        (0.0066, 0.0034),
        "Table 1",
    ),
    _gain(
        "FeatScale on top of NeuTRENO raises the accuracy further.",
        BOTH,
        NEUTRENO,
        ("73.01 → 73.23 (ImageNet)", "91.56 → 91.73"),
        (0.0022, 0.0017),
        "Table 1",
    ),
    _gain(
        "FeatScale whose gains learn ten times as fast raises the accuracy of a softmax transformer.",
        FAST,
        "baseline",
        ("72.17 → 72.346 (ImageNet)", "91.02 → 91.22"),
        (0.0018, 0.0020),
        "Table 1",
    ),
    _gain(
        "NeuTRENO raises it more than FeatScale whose gains learn ten times as fast.",
        NEUTRENO,
        FAST,
        ("72.346 against 73.01 (ImageNet)", "91.22 against 91.56"),
        (0.0066, 0.0034),
        "Table 1",
    ),
    _gain(
        "FeatScale whose gains learn ten times as fast raises the accuracy further on top of NeuTRENO.",
        FAST_BOTH,
        NEUTRENO,
        ("73.01 → 73.23 (ImageNet)", "91.56 → 91.73"),
        (0.0022, 0.0017),
        "Table 1",
    ),
    _gain(
        "A trained model that is adapted with NeuTRENO is more accurate than before.",
        ADAPTED,
        "baseline",
        ("72.17 → 72.63 (ImageNet)", "91.02 → 91.38"),
        (0.0046, 0.0036),
        "Table 1",
    ),
    _gain(
        "Adapting with NeuTRENO is better than training as much longer without it (a control that the paper does not "
        "have).",
        ADAPTED,
        LONGER,
        ("not published", "not published"),
        (None, None),
        "Table 1",
    ),
    _gain(
        "NeuTRENO raises the accuracy of symmetric attention.",
        SYMMETRIC_BOTH,
        SYMMETRIC,
        ("71.14 → 72.07 (ImageNet)", "90.54 → 91.22"),
        (0.0093, 0.0068),
        "Table 5",
    ),
)

WITHIN = (
    Claim(
        text="The tokens of a trained softmax transformer grow alike with depth.",
        source=f"{PAPER}, Fig. 1",
        published={"cosine in the last two layers": "≈ 0.9"},
        tests=(
            ClaimTest(
                arm="baseline",
                outcome="heads/final_cosine/mean",
                says="higher",
                against_outcome="heads/stream_cosine/layer 1",
            ),
        ),
        needs=(LEARNED.name,),
    ),
    Claim(
        text="NeuTRENO's tokens are less alike in the last layers.",
        source=f"{PAPER}, Fig. 1",
        published={"cosine": "significantly lower, in the final layers most (a figure)"},
        tests=(
            ClaimTest(arm=NEUTRENO, outcome="heads/final_cosine/mean", says="lower"),
            ClaimTest(arm=NEUTRENO, outcome="heads/stream_cosine/layer 11", says="lower"),
        ),
        needs=(LEARNED.name,),
    ),
    Claim(
        text="Under softmax attention J falls with depth.",
        source=f"{PAPER}, Fig. 3",
        published={"J": "falls with depth (a figure)"},
        tests=(
            ClaimTest(
                arm="baseline",
                outcome="heads/nonlocal_functional/layer 11",
                says="lower",
                against_outcome="heads/nonlocal_functional/layer 0",
            ),
        ),
        needs=(LEARNED.name,),
    ),
    Claim(
        text="The symmetric and the asymmetric gradient of J point nearly the same way in a trained softmax "
        "transformer.",
        source="ours; Table 4 of the source gives another quantity, whose figure of a symmetric model is .976: here "
        "that is 1 by definition",
        # "nearly" is taken as above 0.9
        tests=(ClaimTest(arm="baseline", outcome="heads/gradient_cosine/mean", says="higher", level=0.9),),
        needs=(LEARNED.name,),
    ),
    Claim(
        text="Under NeuTRENO the maps of successive layers are less alike in the last layers.",
        source=f"{PAPER}, Fig. 5",
        published={"cosine": "lower as depth increases (a figure)"},
        tests=(ClaimTest(arm=NEUTRENO, outcome="heads/layer_redundancy_mean/layer 11", says="lower"),),
        needs=(LEARNED.name,),
    ),
)

STUDY = Study(
    name="neutreno-cifar",
    title="NeuTRENO in image classification",
    question="Does NeuTRENO raise the accuracy of a DeiT-like transformer, alone, beside FeatScale, in symmetric "
    "attention and in a model trained without it, and does it keep tokens, values and maps apart?",
    task=DeiT(
        **SMALL,
        head_statistics=(
            "stream_cosine",
            "final_cosine",
            "token_cosine",
            "nonlocal_functional",
            "gradient_cosine",
            "layer_redundancy_mean",
        ),
    ),
    task_place="headwise_papers.tasks.deit:DeiT",
    methods=(NEUTRENO, FEATSCALE, BOTH, FAST, FAST_BOTH, SYMMETRIC, SYMMETRIC_BOTH, LONGER, ADAPTED),
    premises=(LEARNED, *MOVED.values()),
    claims=(*CLAIMS, *WITHIN),
    scales={
        "small": Scale(settings={}, seeds=10),
        # minutes a run on one GPU: the shape and recipe of `paper`, in two thirds of its epochs
        "gpu": Scale(settings=PUBLISHED | {"epochs": 200}, seeds=6),
        "paper": Scale(settings=PUBLISHED, seeds=5),
    },
    notes=(
        "The paper trains on ImageNet, which is not freely available: all scales use CIFAR-10. The scale paper has "
        "DeiT-tiny's shape and recipe "
        "on patches of 4 pixels, without its RandAugment, mixing, erasing and stochastic depth.",
        "Adaptation is a second phase, a third as long as the first, with NeuTRENO switched on over its first fifth; "
        "the paper's phase also takes a third of the epochs. It is compared with the model before, as published, and "
        "with equally long further training without NeuTRENO.",
        "Statistics of tokens, J, gradients and maps are read on 512 test images; in a symmetric model both gradients "
        "of J are equal, and their cosine is 1 by definition. Table 4 of the source has .982 and .976 there, and so "
        "another quantity: its .973 and .964 of the softmax model are not compared with ours.",
    ),
)
