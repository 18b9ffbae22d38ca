"""A study of entropy collapse: does the entropy alert of `headwise.watch` precede a divergence, and do remedies help?

A small ViT without the norm before attention (where the paper uses SigmaReparam, Zhai et al. 2023, arXiv 2303.06296)
is trained on handwritten digits with a learning rate that is too high for it. A fifth of the labels is random, which
sets a floor of the loss and makes 1.2 × its minimum a meaningful threshold.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwise.lab.experiments.premises import failure_arose
from headwise.lab.experiments.recipe import OptimizerName
from headwise.lab.studies.digits import images_and_digits
from headwise.study import Claim, ClaimTest, Study, Task, VisionTransformer


class NoisyDigits(Task):
    """Classification of handwritten digits, with partly random training labels and no norm before attention."""

    # chance for ten digits
    failure = 0.1

    optimizer: OptimizerName = "adam"
    learning_rate: float = 0.01
    warmup: float = 100
    steps: int | None = 250
    batch_size: int = 128
    weight_decay: float = 0.0
    train_size: int | None = 1300
    divergence_factor: float | None = 1.2
    # statistics for alerts are read before every fifth step, so leads are accurate to four steps
    watch_every: int | None = 5
    watch_statistics: tuple[str, ...] = ("entropy_share", "max_logit", "token_cosine")
    random_labels: float = 0.2
    dim: int = 64
    depth: int = 3
    heads: int = 4
    patch: int = 2

    def model(self) -> VisionTransformer:
        """Return a ViT without norms before attention."""
        model = VisionTransformer(
            classes=10,
            image_size=8,
            channels=1,
            patch=self.patch,
            dim=self.dim,
            depth=self.depth,
            heads=self.heads,
            head_dim=self.dim // self.heads,
            mlp_dim=2 * self.dim,
        )
        for block in model.blocks:
            block.norm1 = nn.Identity()
        return model

    def data(self, split: str) -> tuple[Tensor, Tensor] | None:
        """Return images (B, 1, 8, 8) in [-1, 1] and digits: 1,397 with partly random labels for training, 400 for the
        test."""
        if split == "validation":
            return None
        images, digits = images_and_digits(slice(0, 400) if split == "test" else slice(400, None))
        if split == "train":
            generator = torch.Generator().manual_seed(0)
            wrong = torch.rand(len(digits), generator=generator) < self.random_labels
            digits = torch.where(wrong, torch.randint(10, (len(digits),), generator=generator), digits)
        return images, digits


STUDY = Study(
    name="entropy-collapse",
    title="Entropy collapse: the alert before the divergence",
    question="When a transformer diverges at a learning rate that is too high, does the entropy alert come before the "
    "loss shows it, and does the same run with SigmaReparam or with QKNorm not diverge?",
    task=NoisyDigits(),
    task_place="headwise_papers.entropy_collapse:NoisyDigits",
    methods=('SigmaReparam(init="one")', 'QKNorm(norm="rms")'),
    watch=True,
    premises=(failure_arose(),),
    claims=(
        Claim(
            text="Low attention entropy and instability come together, and SigmaReparam prevents both.",
            source="Zhai et al. 2023, arXiv 2303.06296",
            tests=(
                ClaimTest(arm='SigmaReparam(init="one")', outcome="watched/entropy_share/least", says="higher"),
                ClaimTest(arm='SigmaReparam(init="one")', outcome="diverged", says="lower"),
            ),
        ),
        Claim(
            text="SigmaReparam keeps a transformer from diverging where the plain one does.",
            source="Zhai et al. 2023, arXiv 2303.06296",
            tests=(ClaimTest(arm='SigmaReparam(init="one")', outcome="diverged", says="lower"),),
        ),
        Claim(
            text="A norm on queries and keys keeps a transformer from diverging at a high learning rate.",
            source="Dehghani et al. 2023, arXiv 2302.05442",
            tests=(ClaimTest(arm='QKNorm(norm="rms")', outcome="diverged", says="lower"),),
        ),
    ),
    notes=(
        "Diverged: the first step whose loss, smoothed with a weight of 0.95 of the past, exceeds 1.2 × its minimum. "
        "Smoothing delays this: --set divergence_smoothing=0.8 asks whether the alert leads a quicker judgement too.",
        "An alert's lead is the steps from the first reading below the threshold to the divergence, in runs that had "
        "both; all thresholds are the defaults of headwise.watch.",
        "The setting was searched for with other draws: the norm before attention was taken out and the learning rate "
        "raised until the plain model diverged. The study shows that the alert can come first and that the remedies "
        "can help, not how often they do elsewhere.",
    ),
)
