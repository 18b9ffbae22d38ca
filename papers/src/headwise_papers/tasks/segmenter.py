"""Segmenter (Strudel et al. 2021, arXiv 2105.05633): a vision transformer with a decoder of masks by class tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.lab.studies.vision_transformer import ImageBlock


class Encoder(nn.Module):
    """A vision transformer from images (B, 3, H, W) to patch tokens (B, rows·columns, dim), with learned positions."""

    def __init__(self, size: tuple[int, int], patch: int, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        if size[0] % patch or size[1] % patch:
            raise ValueError(f"patch {patch} does not divide the image size {size}; choose a patch that divides both")
        self.patches = nn.Conv2d(3, dim, kernel_size=patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, dim, size[0] // patch, size[1] // patch))
        self.blocks = nn.Sequential(*(ImageBlock(dim, heads, dim // heads, 4 * dim) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images)
        positions: Tensor = self.positions
        if positions.shape[2:] != x.shape[2:]:
            # as the authors do for images of another size than in training
            positions = F.interpolate(positions, x.shape[2:], mode="bilinear")
        return self.norm(self.blocks((x + positions).flatten(2).transpose(1, 2)))


class MaskDecoder(nn.Module):
    """A transformer over patches and one token per class; the masks (B, classes, N) are products of both."""

    def __init__(self, classes: int, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        self.project = nn.Linear(dim, dim)
        self.class_tokens = nn.Parameter(0.02 * torch.randn(1, classes, dim))
        self.blocks = nn.Sequential(*(ImageBlock(dim, heads, dim // heads, 4 * dim) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.to_patch, self.to_class = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mask_norm = nn.LayerNorm(classes)

    def forward(self, tokens: Tensor) -> Tensor:
        classes = self.class_tokens.shape[1]
        x = torch.cat([self.project(tokens), self.class_tokens.expand(len(tokens), -1, -1)], dim=1)
        x = self.norm(self.blocks(x))
        patches = F.normalize(self.to_patch(x[:, :-classes]), dim=-1)
        masks = patches @ F.normalize(self.to_class(x[:, -classes:]), dim=-1).transpose(1, 2)
        return self.mask_norm(masks).transpose(1, 2)


class Segmenter(nn.Module):
    """A model from images (B, 3, H, W) to the class logits of patches, (B, classes, H / patch, W / patch)."""

    def __init__(
        self,
        *,
        classes: int,
        size: tuple[int, int],
        patch: int = 16,
        dim: int = 192,
        depth: int = 12,
        heads: int = 3,
        decoder_depth: int = 2,
    ) -> None:
        super().__init__()
        self.patch = patch
        self.encoder = Encoder(size, patch, dim, depth, heads)
        self.decoder = MaskDecoder(classes, dim, decoder_depth, heads)

    def forward(self, images: Tensor) -> Tensor:
        masks = self.decoder(self.encoder(images))
        return masks.unflatten(2, (images.shape[2] // self.patch, images.shape[3] // self.patch))
