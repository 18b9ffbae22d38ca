"""The default study: a small ViT on the handwritten digits of scikit-learn with few training images.

These methods are intended for few images. Of 1,797 images of 8×8 pixels, 800 are for test, 200 for validation, and each
seed trains on `train_size` of the other 797.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.lab.experiments.study import Study
from headwise.lab.experiments.task import Task
from headwise.lab.studies.vision_transformer import VisionTransformer

SPLITS = {"test": slice(0, 800), "validation": slice(800, 1000), "train": slice(1000, None)}


class Digits(Task):
    """Classify handwritten digits from few training images."""

    # accuracy by chance with ten digits
    failure = 0.1

    epochs: int = 30
    batch_size: int = 25
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    train_size: int | None = 200
    dim: int = 48
    depth: int = 3
    heads: int = 4
    head_dim: int = 12
    mlp_dim: int = 96

    def model(self) -> VisionTransformer:
        """Return a ViT of 17 tokens: 16 patches of 2×2 pixels and the class token."""
        shape = self.model_dump(include={"dim", "depth", "heads", "head_dim", "mlp_dim"})
        return VisionTransformer(classes=10, image_size=8, channels=1, patch=2, **shape)

    def data(self, split: str) -> tuple[Tensor, Tensor]:
        """Return images (B, 1, 8, 8) in [-1, 1] and digits of a split, from a fixed shuffle of the whole set."""
        return images_and_digits(SPLITS[split])


def images_and_digits(part: slice) -> tuple[Tensor, Tensor]:
    """Return a part of scikit-learn's digits in a fixed order: images (B, 1, 8, 8) in [-1, 1] and digits (B,)."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))[part]
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 8 - 1
    return images[order], torch.from_numpy(digits.target).long()[order]


STUDY = Study(
    name="digits",
    title="Attention regularizers on few handwritten digits",
    question="Which attention regularizers help a small ViT that sees few training images?",
    task=Digits(),
    task_place="headwise.lab.studies.digits:Digits",
    notes=("Each seed draws its own training images, initial weights and data order, the same for all methods.",),
)
