"""Encoder and decoder layers with a norm before a branch, after the sum, or after a weighted sum (DeepNorm)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

# pre: x + f(LN(x)); post: LN(x + f(x)), Vaswani et al. 2017; deep: LN(alpha·x + f(x)), Wang et al. 2022
SumNorm = Literal["pre", "post", "deep"]


class Residual(nn.Module):
    """A residual connection with a layer norm at the position `norm`; `scale` is DeepNorm's alpha.

    In training the branch is omitted for a whole batch with probability `layer_drop`, without rescaling (Fan et al.
    2020, arXiv 1909.11556).
    """

    def __init__(
        self, dim: int, norm: SumNorm, scale: float = 1.0, dropout: float = 0.0, layer_drop: float = 0.0
    ) -> None:
        super().__init__()
        self.place, self.scale, self.layer_drop = norm, scale, layer_drop
        self.norm, self.dropout = nn.LayerNorm(dim), nn.Dropout(dropout)

    def forward(self, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        if self.training and self.layer_drop and float(torch.rand(())) < self.layer_drop:
            return x if self.place == "pre" else self.norm(self.scale * x)
        if self.place == "pre":
            return x + self.dropout(branch(self.norm(x)))
        return self.norm(self.scale * x + self.dropout(branch(x)))


class EncoderLayer(nn.Module):
    """An encoder layer: attention to the whole sequence, then an MLP with one hidden ReLU layer."""

    def __init__(
        self,
        dim: int,
        heads: int,
        mlp_dim: int,
        norm: SumNorm,
        *,
        scale: float = 1.0,
        dropout: float = 0.0,
        layer_drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = perceptron(dim, mlp_dim)
        self.sum1 = Residual(dim, norm, scale, dropout, layer_drop)
        self.sum2 = Residual(dim, norm, scale, dropout, layer_drop)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """Return (B, T, D) from (B, T, D); `padding` (B, T) is True at positions to ignore."""
        x = self.sum1(x, lambda y: self.self_attn(y, y, y, key_padding_mask=padding, need_weights=False)[0])
        return self.sum2(x, self.mlp)


class DecoderLayer(nn.Module):
    """A decoder layer: causal attention, attention to the memory, then an MLP with one hidden ReLU layer."""

    def __init__(
        self,
        dim: int,
        heads: int,
        mlp_dim: int,
        norm: SumNorm,
        *,
        scale: float = 1.0,
        dropout: float = 0.0,
        layer_drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        # the name in nn.TransformerDecoderLayer, by which headwise recognises cross attention
        self.multihead_attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = perceptron(dim, mlp_dim)
        self.sum1 = Residual(dim, norm, scale, dropout, layer_drop)
        self.sum2 = Residual(dim, norm, scale, dropout, layer_drop)
        self.sum3 = Residual(dim, norm, scale, dropout, layer_drop)

    def forward(self, x: Tensor, causal: Tensor, ended: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        """Return (B, T, D) from (B, T, D) and the memory (B, S, D).

        `causal` (T, T) is True at positions to hide, `ended` (B, T) behind a sentence, `padding` (B, S) at padding of
        the memory.
        """
        masks = {"attn_mask": causal, "key_padding_mask": ended, "need_weights": False}
        x = self.sum1(x, lambda y: self.self_attn(y, y, y, **masks)[0])
        cross = self.multihead_attn
        x = self.sum2(x, lambda y: cross(y, memory, memory, key_padding_mask=padding, need_weights=False)[0])
        return self.sum3(x, self.mlp)


def perceptron(dim: int, mlp_dim: int) -> nn.Sequential:
    """Return the MLP of a layer."""
    return nn.Sequential(nn.Linear(dim, mlp_dim), nn.ReLU(), nn.Linear(mlp_dim, dim))


def sinusoids(count: int, dim: int) -> Tensor:
    """Return the fixed positions (count, dim) of Vaswani et al. 2017, arXiv 1706.03762, sines before cosines."""
    rates = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
    angles = torch.arange(count)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :dim]
