"""The vision transformer of the studies (Dosovitskiy et al. 2020, arXiv 2010.11929), with a choice of norms."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# pre: before attention and MLP; mlp: only before the MLP, as in the blog; none: no norms, for weights that need none
NormPlace = Literal["pre", "mlp", "none"]


class ImageAttention(nn.Module):
    """Fused scaled dot-product attention whose head size does not depend on the width."""

    def __init__(self, dim: int, heads: int, head_dim: int, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * heads * head_dim, bias=bias)
        self.proj = nn.Linear(heads * head_dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, -1))


class ImageBlock(nn.Module):
    """A residual layer of attention and an MLP; `norm` chooses which of them has a norm before it."""

    def __init__(
        self, dim: int, heads: int, head_dim: int, mlp_dim: int, norm: NormPlace = "pre", bias: bool = True
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim) if norm == "pre" else nn.Identity()
        self.attn = ImageAttention(dim, heads, head_dim, bias)
        self.norm2 = nn.Identity() if norm == "none" else nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, mlp_dim), nn.GELU(), nn.Linear(mlp_dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """A vision transformer with a class token and learned positions: images (B, C, S, S) to logits (B, classes).

    `norm="mlp"` is the blog's model: no norm before attention, projections without bias, a class token and positions
    drawn from N(0, 1), and no position for the class token. `norm="none"` has no norms, also not before the head.

    Example:
        >>> import torch
        >>> from headwise.study import VisionTransformer
        >>> model = VisionTransformer(
        ...     classes=10, image_size=8, channels=1, dim=16, depth=2, heads=2, head_dim=8, mlp_dim=32
        ... )
        >>> tuple(model(torch.rand(3, 1, 8, 8)).shape)
        (3, 10)
    """

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
        norm: NormPlace = "pre",
    ) -> None:
        super().__init__()
        if image_size % patch:
            raise ValueError(f"patch {patch} does not divide image_size {image_size}; choose a patch that does")
        self.patch = nn.Conv2d(channels, dim, kernel_size=patch, stride=patch)
        is_blog = norm == "mlp"
        std, extra = (1.0, 0) if is_blog else (0.02, 1)
        self.class_token = nn.Parameter(std * torch.randn(1, 1, dim))
        self.positions = nn.Parameter(std * torch.randn(1, (image_size // patch) ** 2 + extra, dim))
        self.blocks = nn.Sequential(
            *(ImageBlock(dim, heads, head_dim, mlp_dim, norm, bias=not is_blog) for _ in range(depth))
        )
        self.norm = nn.Identity() if norm == "none" else nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch(images).flatten(2).transpose(1, 2)
        first = self.class_token.expand(len(patches), -1, -1)
        if self.positions.shape[1] == patches.shape[1]:
            x = torch.cat([first, patches + self.positions], dim=1)
        else:
            x = torch.cat([first, patches], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])
