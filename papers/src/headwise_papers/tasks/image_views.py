"""Random views of images, computed on tensors: a crop of another size and shape, a flip, and changed colours."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

# luma of ITU-R BT.601, and the matrices between RGB and YIQ (luma and two colour differences)
GREY = (0.299, 0.587, 0.114)
YIQ = torch.tensor([GREY, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312)])
RGB = torch.linalg.inv(YIQ)


def view(
    images: Tensor, generator: torch.Generator, *, least_area: float, colour: float, grey: float, jitter: float = 0.8
) -> Tensor:
    """Return one random view of each image (B, 3, S, S): SimCLR's views without blur, as Chen et al. 2020 use on CIFAR.

    Random numbers are drawn on the CPU from `generator`. The hue is rotated in YIQ, while torchvision uses HSV.

    Args:
        images: in [0, 1].
        generator: for the random numbers.
        least_area: smallest share of the image's area in a crop; its aspect ratio is 3:4 to 4:3.
        colour: strength of colour changes; brightness, contrast and saturation change by up to 0.8 times it, the hue by
            up to 0.2 times it of a full rotation.
        grey: share of views without colour.
        jitter: share of views with changed colours.
    """
    images = flip(crop(images, generator, least_area), generator)
    count = len(images)
    changed = recolour(images, generator, colour)
    chosen = torch.rand(count, generator=generator) < jitter
    images = torch.where(_over(chosen, images), changed, images)
    colourless = torch.rand(count, generator=generator) < grey
    return torch.where(_over(colourless, images), luma(images).expand_as(images), images)


def crop(images: Tensor, generator: torch.Generator, least_area: float) -> Tensor:
    """Return a random crop of each image, at least `least_area` of it, resized to the image's size (bilinear)."""
    count = len(images)
    area = least_area + (1 - least_area) * torch.rand(count, generator=generator)
    shape = torch.exp((2 * torch.rand(count, generator=generator) - 1) * math.log(4 / 3))
    width, height = ((area * shape).sqrt().clamp(max=1.0), (area / shape).sqrt().clamp(max=1.0))
    # in coordinates from -1 to 1 over the image, the centre is such that the whole crop is inside
    x, y = ((2 * torch.rand(count, generator=generator) - 1) * (1 - side) for side in (width, height))
    zero = torch.zeros(count)
    transforms = torch.stack([torch.stack([width, zero, x], 1), torch.stack([zero, height, y], 1)], 1)
    grid = nn.functional.affine_grid(transforms.to(images), list(images.shape), align_corners=False)
    return nn.functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


def flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return the images, half of them mirrored from left to right."""
    mirrored = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(_over(mirrored, images), images.flip(-1), images)


def recolour(images: Tensor, generator: torch.Generator, strength: float) -> Tensor:
    """Return images with brightness, contrast, saturation and hue changed in turn by random factors."""
    count = len(images)
    spread = 0.8 * strength
    factors = 1 + spread * (2 * torch.rand(3, count, generator=generator) - 1)
    brightness, contrast, saturation = (_over(factor.clamp(min=0), images) for factor in factors)
    turns = 0.2 * strength * (2 * torch.rand(count, generator=generator) - 1)
    images = (images * brightness).clamp(0, 1)
    middle = luma(images).mean((2, 3), keepdim=True)
    images = (middle + contrast * (images - middle)).clamp(0, 1)
    greyscale = luma(images)
    images = (greyscale + saturation * (images - greyscale)).clamp(0, 1)
    return turn_hue(images, turns)


def turn_hue(images: Tensor, turns: Tensor) -> Tensor:
    """Return images with the hue rotated by a share (B,) of a full turn, at the same luma."""
    cosine, sine = (2 * math.pi * turns).cos(), (2 * math.pi * turns).sin()
    rotations = torch.zeros(len(turns), 3, 3)
    rotations[:, 0, 0] = 1
    rotations[:, 1, 1], rotations[:, 1, 2], rotations[:, 2, 1], rotations[:, 2, 2] = cosine, -sine, sine, cosine
    matrices = (RGB @ rotations @ YIQ).to(images)
    return torch.einsum("bij,bjhw->bihw", matrices, images).clamp(0, 1)


def luma(images: Tensor) -> Tensor:
    """Return the perceived brightness (B, 1, S, S)."""
    weights = torch.tensor(GREY).to(images)
    return (images * weights[:, None, None]).sum(1, keepdim=True)


def _over(one_each: Tensor, images: Tensor) -> Tensor:
    return one_each.to(images.device)[:, None, None, None]
