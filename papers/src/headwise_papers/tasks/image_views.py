"""Random views of images, drawn on tensors: a crop at another size and shape, a flip, and other colours."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

# luma of ITU-R BT.601, and what turns it and two differences of colour into red, green and blue and back
GREY = (0.299, 0.587, 0.114)
YIQ = torch.tensor([GREY, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312)])
RGB = torch.linalg.inv(YIQ)


def view(
    images: Tensor, generator: torch.Generator, *, least_area: float, colour: float, grey: float, jitter: float = 0.8
) -> Tensor:
    """Return one random view of each image (B, 3, S, S) in [0, 1]: SimCLR's, without blur, as Chen et al. 2020 do on
    CIFAR.

    Draws are made on the CPU from `generator`. The hue is turned in YIQ, where torchvision goes through HSV.

    Args:
        images: in [0, 1].
        generator: of the draws.
        least_area: of the image's area, for the crop; its sides are 3:4 to 4:3.
        colour: strength; brightness, contrast and saturation change by up to 0.8 times it, the hue by 0.2 times a whole
            turn.
        grey: share of views without colour.
        jitter: share of views with other colours.
    """
    images = flip(crop(images, generator, least_area), generator)
    count = len(images)
    changed = recolour(images, generator, colour)
    chosen = torch.rand(count, generator=generator) < jitter
    images = torch.where(_over(chosen, images), changed, images)
    without = torch.rand(count, generator=generator) < grey
    return torch.where(_over(without, images), luma(images).expand_as(images), images)


def crop(images: Tensor, generator: torch.Generator, least_area: float) -> Tensor:
    """Return a random part of each image, at least `least_area` of it, at the image's own size (bilinear)."""
    count = len(images)
    area = least_area + (1 - least_area) * torch.rand(count, generator=generator)
    shape = torch.exp((2 * torch.rand(count, generator=generator) - 1) * math.log(4 / 3))
    width, height = ((area * shape).sqrt().clamp(max=1.0), (area / shape).sqrt().clamp(max=1.0))
    # from -1 to 1 over the image: the middle of the part lies where the whole part is inside
    x, y = ((2 * torch.rand(count, generator=generator) - 1) * (1 - side) for side in (width, height))
    zero = torch.zeros(count)
    moves = torch.stack([torch.stack([width, zero, x], 1), torch.stack([zero, height, y], 1)], 1)
    places = nn.functional.affine_grid(moves.to(images), list(images.shape), align_corners=False)
    return nn.functional.grid_sample(images, places, padding_mode="border", align_corners=False)


def flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror half of the images from left to right."""
    mirrored = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(_over(mirrored, images), images.flip(-1), images)


def recolour(images: Tensor, generator: torch.Generator, strength: float) -> Tensor:
    """Change brightness, then contrast, saturation and hue of each image by random factors."""
    count = len(images)
    spread = 0.8 * strength
    factors = 1 + spread * (2 * torch.rand(3, count, generator=generator) - 1)
    brightness, contrast, saturation = (_over(one.clamp(min=0), images) for one in factors)
    turns = 0.2 * strength * (2 * torch.rand(count, generator=generator) - 1)
    images = (images * brightness).clamp(0, 1)
    middle = luma(images).mean((2, 3), keepdim=True)
    images = (middle + contrast * (images - middle)).clamp(0, 1)
    without = luma(images)
    images = (without + saturation * (images - without)).clamp(0, 1)
    return turn_hue(images, turns)


def turn_hue(images: Tensor, turns: Tensor) -> Tensor:
    """Turn the hue of each image by a share (B,) of a whole turn, at the same luma."""
    cosine, sine = (2 * math.pi * turns).cos(), (2 * math.pi * turns).sin()
    moves = torch.zeros(len(turns), 3, 3)
    moves[:, 0, 0] = 1
    moves[:, 1, 1], moves[:, 1, 2], moves[:, 2, 1], moves[:, 2, 2] = cosine, -sine, sine, cosine
    whole = (RGB @ moves @ YIQ).to(images)
    return torch.einsum("bij,bjhw->bihw", whole, images).clamp(0, 1)


def luma(images: Tensor) -> Tensor:
    """Return the brightness (B, 1, S, S) as seen."""
    weights = torch.tensor(GREY).to(images)
    return (images * weights[:, None, None]).sum(1, keepdim=True)


def _over(one_each: Tensor, images: Tensor) -> Tensor:
    return one_each.to(images.device)[:, None, None, None]
