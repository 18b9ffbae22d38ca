"""Multi-scale segmentation: class probabilities averaged over rescaled and mirrored images, with a sliding window for
large ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

# a function from images (B, 3, H, W) to the logits of their patches (B, classes, H / patch, W / patch)
Masks = Callable[[Tensor], Tensor]


def multi_scale(model: Masks, images: Tensor, scales: Iterable[float], patch: int, pixels: Sequence[int]) -> Tensor:
    """Return class probabilities (B, classes, rows, columns) at `pixels` (rows, columns) of images (B, 3, H, W).

    They are averaged over all scales, each plain and mirrored (Strudel et al. 2021, arXiv 2105.05633). Scaled sizes
    are whole patches; images larger than H × W are processed in windows of that size.
    """
    size = images.shape[2:]
    probabilities = []
    for scale in scales:
        scaled_size = [max(1, round(scale * side / patch)) * patch for side in size]
        scaled = F.interpolate(images, scaled_size, mode="bilinear", antialias=True)
        for mirrored in (False, True):
            masks = through_windows(model, scaled.flip(3) if mirrored else scaled, size, patch)
            probabilities.append(at_pixels(masks.flip(3) if mirrored else masks, pixels).softmax(1))
    return torch.stack(probabilities).mean(0)


def through_windows(model: Masks, images: Tensor, window: Sequence[int], patch: int) -> Tensor:
    """Return the logits of all patches of images, computed in windows of `window` pixels and averaged where they
    overlap.

    Windows start at whole patches, at most half a window apart, so that the patches of all windows coincide.
    """
    grid, part = [side // patch for side in images.shape[2:]], [side // patch for side in window]
    corners = list(product(*(window_starts(*sides) for sides in zip(grid, part, strict=True))))
    times_covered = images.new_zeros(grid)
    total: Tensor | float = 0.0
    for top, left in corners:
        rows, columns = slice(top, top + part[0]), slice(left, left + part[1])
        pixel_slices = slice(top * patch, (top + part[0]) * patch), slice(left * patch, (left + part[1]) * patch)
        masks = model(images[:, :, pixel_slices[0], pixel_slices[1]])
        padding = (left, grid[1] - left - masks.shape[3], top, grid[0] - top - masks.shape[2])
        total = total + F.pad(masks, padding)
        times_covered[rows, columns] += 1
    return total / times_covered


def window_starts(whole: int, part: int) -> list[int]:
    """Return the evenly spaced starts of windows of `part` on a side of `whole`, from its start to its end."""
    if whole <= part:
        return [0]
    steps = -(-2 * (whole - part) // part)
    return [round(step * (whole - part) / steps) for step in range(steps + 1)]


def at_pixels(masks: Tensor, pixels: Sequence[int]) -> Tensor:
    """Return the logits of patches, interpolated to `pixels` (rows, columns)."""
    return F.interpolate(masks, tuple(pixels), mode="bilinear")
