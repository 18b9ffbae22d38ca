"""Random views of images, computed on tensors: a crop of another size and shape, a flip, and changed colours.

What is random of them is drawn apart, on the CPU, so that it can be drawn and copied for many batches at once.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

# luma of ITU-R BT.601, and the matrices between RGB and YIQ (luma and two colour differences)
GREY = (0.299, 0.587, 0.114)
YIQ = torch.tensor([GREY, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312)])
RGB = torch.linalg.inv(YIQ)


# random numbers of a view: four of its crop, one of its flip, four of its colours, and one for each share
DRAWS = 11


class View(NamedTuple):
    """What is drawn for views of B images, on the CPU or where it was moved.

    Attributes:
        crops: transforms (B, 2, 3) of coordinates from -1 to 1.
        mirrored: whether a view is mirrored (B,).
        factors: of brightness, contrast and saturation (3, B).
        hues: matrices (B, 3, 3) of RGB that turn the hue.
        recoloured: whether a view has these colours (B,).
        colourless: whether it has none at all (B,).
    """

    crops: Tensor
    mirrored: Tensor
    factors: Tensor
    hues: Tensor
    recoloured: Tensor
    colourless: Tensor


def draw_views(
    count: int,
    generator: torch.Generator,
    *,
    least_area: float,
    colour: float,
    grey: float,
    jitter: float = 0.8,
    views: int = 1,
) -> View:
    """Return the draws of random views of images: SimCLR's without blur, as Chen et al. 2020 use on CIFAR.

    Args:
        count: of images.
        generator: for the random numbers, of the CPU.
        least_area: smallest share of the image's area in a crop; its aspect ratio is 3:4 to 4:3.
        colour: strength of colour changes; brightness, contrast and saturation change by up to 0.8 times it, the hue by
            up to 0.2 times it of a full rotation.
        grey: share of views without colour.
        jitter: share of views with changed colours.
        views: of each image: the first of all images, then the second.
    """
    numbers = torch.rand(views, DRAWS, count, generator=generator).transpose(0, 1).reshape(DRAWS, -1)
    return View(
        crops(numbers[:4], least_area),
        numbers[4] < 0.5,
        (1 + 0.8 * colour * (2 * numbers[5:8] - 1)).clamp(min=0),
        hues(0.2 * colour * (2 * numbers[8] - 1)),
        numbers[9] < jitter,
        numbers[10] < grey,
    )


def view(images: Tensor, drawn: View) -> Tensor:
    """Return the drawn view of each image (B, 3, S, S) in [0, 1]; nothing waits for a device that holds both."""
    images = flip(crop(images, drawn.crops), drawn.mirrored)
    changed = turn_hue(recolour(images, drawn.factors), drawn.hues)
    images = torch.where(_over(drawn.recoloured, images), changed, images)
    return torch.where(_over(drawn.colourless, images), luma(images).expand_as(images), images)


def crops(numbers: Tensor, least_area: float) -> Tensor:
    """Return the transforms (B, 2, 3) to crops of at least `least_area` of an image, by numbers (4, B) in [0, 1)."""
    area = least_area + (1 - least_area) * numbers[0]
    shape = torch.exp((2 * numbers[1] - 1) * math.log(4 / 3))
    sides = torch.stack([area * shape, area / shape]).sqrt().clamp(max=1.0)
    transforms = torch.zeros(numbers.shape[1], 2, 3)
    transforms[:, 0, 0], transforms[:, 1, 1] = sides
    # in coordinates from -1 to 1 over the image, the centre is such that the whole crop is inside
    transforms[:, :, 2] = ((2 * numbers[2:] - 1) * (1 - sides)).T
    return transforms


def crop(images: Tensor, transforms: Tensor) -> Tensor:
    """Return a crop of each image, resized to the image's size (bilinear)."""
    grid = nn.functional.affine_grid(transforms.to(images), list(images.shape), align_corners=False)
    return nn.functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


def flip(images: Tensor, mirrored: Tensor) -> Tensor:
    """Return the images, those of `mirrored` (B,) turned from left to right."""
    return torch.where(_over(mirrored, images), images.flip(-1), images)


def recolour(images: Tensor, factors: Tensor) -> Tensor:
    """Return images with brightness, contrast and saturation changed in turn by factors (3, B)."""
    brightness, contrast, saturation = (_over(factor, images) for factor in factors)
    images = (images * brightness).clamp(0, 1)
    middle = luma(images).mean((2, 3), keepdim=True)
    images = (middle + contrast * (images - middle)).clamp(0, 1)
    greyscale = luma(images)
    return (greyscale + saturation * (images - greyscale)).clamp(0, 1)


def hues(turns: Tensor) -> Tensor:
    """Return the matrices (B, 3, 3) of RGB that rotate the hue by a share (B,) of a full turn, at the same luma.

    They rotate in YIQ, while torchvision uses HSV.
    """
    cosine, sine = (2 * math.pi * turns).cos(), (2 * math.pi * turns).sin()
    rotations = torch.zeros(len(turns), 3, 3)
    rotations[:, 0, 0] = 1
    rotations[:, 1, 1], rotations[:, 1, 2], rotations[:, 2, 1], rotations[:, 2, 2] = cosine, -sine, sine, cosine
    return RGB @ rotations @ YIQ


def turn_hue(images: Tensor, matrices: Tensor) -> Tensor:
    """Return images whose colours are multiplied by matrices (B, 3, 3)."""
    return torch.einsum("bij,bjhw->bihw", matrices.to(images), images).clamp(0, 1)


def luma(images: Tensor) -> Tensor:
    """Return the perceived brightness (B, 1, S, S)."""
    return (images * _grey(images.device, images.dtype)).sum(1, keepdim=True)


@functools.cache
def _grey(device: torch.device, dtype: torch.dtype) -> Tensor:
    # kept, because each copy to a device waits for it
    return torch.tensor(GREY).to(device, dtype)[:, None, None]


def _over(one_each: Tensor, images: Tensor) -> Tensor:
    return one_each.to(images.device)[:, None, None, None]
