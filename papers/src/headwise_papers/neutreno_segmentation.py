"""NeuTRENO in segmentation: the strengths at which the fidelity term in a Segmenter's encoder helps or collapses.

Nguyen et al. 2023 (arXiv 2312.00751) fine-tune on ADE20K from weights trained on ImageNet; here every model is trained
from random weights on CamVid.
"""

from __future__ import annotations

from headwise.lab.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.street_scenes import StreetScenes

SOURCE = "Nguyen et al. 2023, arXiv 2312.00751"
SWEEP = "NeuTRENO(strength={0.1,0.6,2,8}) @ encoder"
PUBLISHED, LARGEST = "NeuTRENO(strength=0.6) @ encoder", "NeuTRENO(strength=8) @ encoder"
SYMMETRIC = 'SymmetricAttention(keep="keys") @ encoder'
SYMMETRIC_BOTH = 'SymmetricAttention(keep="keys") + NeuTRENO(strength=0.6) @ encoder'
SINGLE, MULTI = "test/miou", "multi-scale/miou"

STUDY = Study(
    name="neutreno-segmentation",
    title="NeuTRENO in a Segmenter on street scenes",
    question="Does NeuTRENO raise the mean IoU of a Segmenter, with its best strength inside the range and a collapse "
    "at its end?",
    task=StreetScenes(),
    task_place="headwise_papers.tasks.street_scenes:StreetScenes",
    methods=(PUBLISHED, SYMMETRIC, SYMMETRIC_BOTH),
    sweeps=(SWEEP,),
    # the mean IoU of the constant answer "road": 26.7 % of the pixels, one class of eleven
    premises=(learned(SINGLE, 0.024, 0.1),),
    claims=(
        Claim(
            text="NeuTRENO at strength 0.6 raises the mean IoU, at a single scale and at several.",
            source=f"{SOURCE}, table 2: Segmenter on ADE20K",
            published={"single-scale mIoU": "35.72 → 37.24 %", "multi-scale mIoU": "36.68 → 38.06 %"},
            tests=(
                ClaimTest(arm=PUBLISHED, outcome=SINGLE, says="higher", effect=0.0152),
                ClaimTest(arm=PUBLISHED, outcome=MULTI, says="higher", effect=0.0138),
            ),
        ),
        Claim(
            text="The best strength lies inside the range.",
            source=f"{SOURCE}, table 13",
            published={
                "single-scale mIoU by rising strength": "34.94, 35.60, 37.54, 37.38, 37.24, 36.71, 36.37, 26.25 %"
            },
            tests=(ClaimTest(arm=SWEEP, outcome=SINGLE, says="inside"),),
        ),
        Claim(
            text="The largest strength, here 8, collapses: its mean IoU is far below that of the plain model.",
            source=f"{SOURCE}, table 13",
            published={"single-scale mIoU": "35.72 → 26.25 %", "multi-scale mIoU": "36.68 → 27.2 %"},
            tests=(
                ClaimTest(arm=LARGEST, outcome=SINGLE, says="lower", effect=-0.0947),
                ClaimTest(arm=LARGEST, outcome=MULTI, says="lower", effect=-0.0948),
            ),
        ),
        Claim(
            text="With symmetric attention too NeuTRENO at strength 0.6 raises the mean IoU, at a single scale and at "
            "several.",
            source=f"{SOURCE}, table 6: Segmenter on ADE20K",
            published={"mean IoU": "substantially better (in words)"},
            tests=tuple(
                ClaimTest(arm=SYMMETRIC_BOTH, outcome=outcome, says="higher", against=SYMMETRIC)
                for outcome in (SINGLE, MULTI)
            ),
        ),
        Claim(
            text="Tokens are less alike with NeuTRENO, in the mean over layers and behind the last.",
            source=f"{SOURCE}, figure 1 (right): ADE20K, of which no figures are given",
            tests=(
                ClaimTest(arm=PUBLISHED, outcome="heads/stream_cosine/mean", says="lower"),
                ClaimTest(arm=PUBLISHED, outcome="heads/final_cosine/mean", says="lower"),
            ),
        ),
    ),
    scales={
        "small": Scale(settings={}, seeds=8),
        "paper": Scale(
            settings={
                "steps": 20_000,
                "learning_rate": 5e-4,
                "warmup": 500,
                "patch": 12,
                "dim": 192,
                "depth": 12,
                "heads": 3,
                "decoder_depth": 2,
                "stride": 1,
                "zoom": 2.0,
                "scales": (0.5, 0.75, 1.0, 1.25, 1.5, 1.75),
                "multi_scale_images": None,
            },
            seeds=5,
        ),
    },
    notes=(
        "NeuTRENO acts in the encoder, in training and in the test; the text on which this study is based does not "
        "give the strengths of the published table.",
        "Small: 108 patches of 20 × 20 pixels, and every fourth row and column of pixels is learned and judged, in "
        "all arms; 600 steps of 8 images are 13 passes. Several scales are evaluated on the first 40 of the 233 test "
        "images in a shuffled order.",
        "Paper: the published model and scales, on CamVid, from random weights. ADE20K and the backbone trained on "
        "ImageNet are not read, so that the published fine-tuning itself is not repeated.",
    ),
)
