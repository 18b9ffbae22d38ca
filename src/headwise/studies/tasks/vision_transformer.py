"""The vision transformer of the built-in studies (Dosovitskiy et al. 2020, arXiv 2010.11929), pre-LN."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Attend with fused scaled dot-product attention; the head size is free of the width."""

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * heads * head_dim)
        self.proj = nn.Linear(heads * head_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, -1))


class Block(nn.Module):
    """Add attention, then an MLP, each on its normalised input."""

    def __init__(self, dim: int, heads: int, head_dim: int, mlp_dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads, head_dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, mlp_dim), nn.GELU(), nn.Linear(mlp_dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Classify images (B, C, S, S) from a class token, with learned positions: (B, classes)."""

    def __init__(
        self,
        *,
        classes: int,
        image_size: int,
        channels: int = 3,
        patch: int = 4,
        dim: int = 128,
        depth: int = 6,
        heads: int = 5,
        head_dim: int = 64,
        mlp_dim: int = 128,
    ) -> None:
        super().__init__()
        if image_size % patch:
            raise ValueError(f"patch {patch} does not divide image_size {image_size}; choose a patch that does")
        self.patch = nn.Conv2d(channels, dim, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (image_size // patch) ** 2 + 1, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads, head_dim, mlp_dim) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(patches), -1, -1), patches], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])
