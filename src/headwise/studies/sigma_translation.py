"""SigmaReparam in translation: as good as DeepNorm at 6 layers a side, near it at 18, behind it at 50 but stable?

Zhai et al. 2023 train on WMT up to 100 layers a side; here a narrow transformer learns Multi30k from German to English.
"""

from __future__ import annotations

from headwise.comparing.results.records import ClaimRecord, ClaimTest
from headwise.comparing.study import Scale, Study
from headwise.studies.tasks.translation import Translation

SOURCE = "Zhai et al. 2023, arXiv 2303.06296, machine translation"
SIGMA = 'SigmaReparam(layers="all")'
SMALL = {
    "dim": 32,
    "depth": 6,
    "heads": 4,
    "mlp_dim": 64,
    "vocabulary": 2000,
    "label_smoothing": 0.1,
    "translated": 100,
    "test_size": 400,
    "tokens_per_batch": 500,
    "optimizer": "adam",
    "betas": (0.9, 0.98),
    "learning_rate": 5e-3,
    "weight_decay": 0.0,
    "warmup": 20,
    "schedule": "linear",
    "steps": 100,
    "divergence_factor": 1.5,
    "divergence_smoothing": 0.8,
    "head_statistics": ("attention_entropy",),
}
# a transformer of Vaswani et al.'s base width, as DeepNorm's on WMT
PAPER = {
    "dim": 512,
    "heads": 8,
    "mlp_dim": 2048,
    "vocabulary": 10_000,
    "dropout": 0.1,
    "translated": None,
    "test_size": None,
    "tokens_per_batch": 16_000,
    "learning_rate": 5e-4,
    "warmup": 4000,
    "schedule": "inverse_sqrt",
    "steps": 20_000,
    "divergence_smoothing": 0.95,
    "dtype": "bfloat16",
}


def deep(depth: int, *, sigma: bool, norm: str = "post") -> str:
    """Write an arm of so many layers a side."""
    changes = [f"depth={depth}"] * (depth != 6) + [f"norm={norm}"] * (norm != "post")
    return (SIGMA if sigma else "baseline") + (f" | {', '.join(changes)}" if changes else "")


STUDY = Study(
    name="sigma-translation",
    title="SigmaReparam in translation",
    question="Is SigmaReparam as good as DeepNorm at 6 layers a side, near it at 18, and behind it but stable at 50?",
    task=Translation.model_validate(SMALL),
    task_place="headwise.studies.tasks.translation:Translation",
    methods=tuple(
        deep(depth, sigma=sigma, norm=norm)
        for depth in (6, 18, 50)
        for norm in ("post", "deep")
        for sigma in (False, True)
        if (depth, norm, sigma) != (6, "post", False)
    ),
    scales={"small": Scale(settings=SMALL, seeds=10), "paper": Scale(settings=SMALL | PAPER, seeds=3)},
    notes=(),
)
