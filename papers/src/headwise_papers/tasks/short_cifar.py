"""CIFAR-10 in a few hundred steps, for studies of how a training begins and whether it stays stable."""

from __future__ import annotations

from typing import ClassVar, Literal

from headwise.study import Evaluation
from headwise_papers.tasks.cifar import Cifar


class ShortCifar(Cifar):
    """Classify CIFAR-10's images after few steps of a small ViT; the training split is not read again at the end."""

    test_curve: ClassVar[bool] = False

    name: Literal["cifar10", "cifar100"] = "cifar10"
    dim: int = 64
    depth: int = 6
    heads: int = 4
    head_dim: int = 16
    mlp_dim: int = 128
    patch: int = 8
    # each training image is seen once
    train_size: int | None = 12_800
    test_size: int | None = 3000
    batch_size: int = 32
    steps: int | None = 400
    learning_rate: float = 1e-3
    warmup: float = 0.1
    schedule: Literal["constant", "cosine", "linear", "inverse_sqrt", "plateau"] = "cosine"
    weight_decay: float = 0.05
    # a loss that rises by half over its minimum is near or above that of chance
    divergence_factor: float | None = 1.5
    watch_examples: int = 64

    def evaluations(self) -> list[Evaluation]:
        """Leave the pass over the training split out."""
        return [Evaluation("train", when="never")]
