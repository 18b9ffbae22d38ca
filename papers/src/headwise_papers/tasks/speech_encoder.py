"""A transformer from cepstra to scores of letters, frame by frame, for CTC."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwise_papers.tasks import deep_norm
from headwise_papers.tasks.transformer_layers import EncoderLayer, SumNorm, sinusoids

# width of the convolution in frames, as in the model of Zhai et al. 2023
KERNEL = 7


class SpeechEncoder(nn.Module):
    """A model that returns log probabilities (B, frames, 1 + letters) of CTC's blank and the letters.

    The inputs are features (B, T, F) and their lengths (B,). A gated convolution of stride `stride` gives
    `shorter(lengths, stride)` frames with sinusoidal positions. A pre-LN stack has a final norm.
    """

    # a checkpoint of other letters is refused, even if their number is equal
    same_in_checkpoints = ("letters",)
    letters: Tensor

    def __init__(
        self,
        features: int,
        letters: str,
        *,
        dim: int,
        depth: int,
        heads: int,
        mlp_dim: int,
        norm: SumNorm,
        stride: int,
        dropout: float = 0.0,
        layer_drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.stride = stride
        self.register_buffer("letters", torch.tensor([ord(letter) for letter in letters]))
        self.shorten = nn.Conv1d(features, 2 * dim, KERNEL, stride, padding=KERNEL // 2)
        constants = deep_norm.encoder_alone(depth)
        scale = constants.alpha if norm == "deep" else 1.0
        settings = {"scale": scale, "dropout": dropout, "layer_drop": layer_drop}
        self.layers = nn.ModuleList(EncoderLayer(dim, heads, mlp_dim, norm, **settings) for _ in range(depth))
        if norm == "deep":
            for layer in self.layers:
                deep_norm.initialise(layer, constants.beta)
        self.norm = nn.LayerNorm(dim) if norm == "pre" else nn.Identity()
        self.head = nn.Linear(dim, 1 + len(letters))

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        x = nn.functional.glu(self.shorten(features.transpose(1, 2)), dim=1).transpose(1, 2)
        x = x + sinusoids(x.shape[1], x.shape[2]).to(x)
        frames = shorter(lengths, self.stride)
        padding = torch.arange(x.shape[1], device=x.device) >= frames[:, None]
        for layer in self.layers:
            x = layer(x, padding)
        return self.head(self.norm(x)).log_softmax(-1)


def shorter(lengths: Tensor, stride: int) -> Tensor:
    """Return the numbers of frames after the convolution."""
    return (lengths - 1) // stride + 1
