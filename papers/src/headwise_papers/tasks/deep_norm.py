"""DeepNorm: weights of residuals and initialisation by depth (Wang et al. 2022, arXiv 2203.00555)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class DeepNorm:
    """The weight `alpha` of a layer's input in its sums, and the gain `beta` of its initial weights."""

    alpha: float
    beta: float


def encoder_alone(layers: int) -> DeepNorm:
    """Return the constants of an encoder alone, or of a decoder alone, with this number of layers."""
    return DeepNorm((2 * layers) ** 0.25, (8 * layers) ** -0.25)


def encoder_and_decoder(encoder: int, decoder: int) -> tuple[DeepNorm, DeepNorm]:
    """Return the constants of an encoder and of its decoder."""
    root = (encoder**4 * decoder) ** (1 / 16)
    return DeepNorm(0.81 * root, 0.87 / root), DeepNorm((3 * decoder) ** 0.25, (12 * decoder) ** -0.25)


@torch.no_grad()
def initialise(layer: nn.Module, beta: float) -> None:
    """Initialise the weights of a layer by Xavier's normal, with gain 1 in q and k, and `beta` in all other layers."""
    for module in layer.modules():
        if isinstance(module, nn.MultiheadAttention):
            for part, gain in zip(module.in_proj_weight.chunk(3), (1.0, 1.0, beta), strict=True):
                nn.init.xavier_normal_(part, gain)
            nn.init.xavier_normal_(module.out_proj.weight, beta)
        # the output projection of attention is a subclass of nn.Linear, initialised above
        elif type(module) is nn.Linear:
            nn.init.xavier_normal_(module.weight, beta)
