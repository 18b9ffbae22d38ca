"""CIFAR-10 in a few hundred steps, for studies of early training and of stability."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from headwise.study import Evaluation, VisionTransformer
from headwise_papers.tasks.cifar import Cifar


class ShortCifar(Cifar):
    """Classification of CIFAR-10 by a small ViT after few steps, not evaluated on the training split."""

    test_curve: ClassVar[bool] = False

    name: Literal["cifar10", "cifar100"] = "cifar10"
    dim: int = 64
    depth: int = 6
    heads: int = 4
    head_dim: int = 16
    mlp_dim: int = 128
    patch: int = 8
    # each training image is used once
    train_size: int | None = 12_800
    test_size: int | None = 3000
    batch_size: int = 32
    steps: int | None = 400
    learning_rate: float = 1e-3
    warmup: float = 0.1
    schedule: Literal["constant", "cosine", "linear", "inverse_sqrt", "plateau"] = "cosine"
    weight_decay: float = 0.05
    # a loss 1.5 times its minimum is near or above that of chance
    divergence_factor: float | None = 1.5
    watch_examples: int = 64

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations without the training split."""
        return [Evaluation("train", when="never")]


class WeightedCifar(ShortCifar):
    """The same with initial weights of a given size, for models without norms: torch's own depend on the width."""

    initial_std: float | None = Field(
        None, gt=0, description="standard deviation of the initial weights, whose biases are 0; none: torch's own"
    )

    def model(self) -> VisionTransformer:
        """Return the ViT, with the weights of its linear layers and patches drawn from N(0, initial_std²)."""
        model = super().model()
        if self.initial_std is not None:
            for module in model.modules():
                if isinstance(module, nn.Linear | nn.Conv2d):
                    nn.init.trunc_normal_(module.weight, std=self.initial_std)
                    if module.bias is not None:
                        nn.init.zeros_(module.bias)
        return model
