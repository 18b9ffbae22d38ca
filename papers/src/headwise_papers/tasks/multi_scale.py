"""Multi-scale segmentation: class shares averaged over rescaled and mirrored images, large ones seen through a sliding
window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

# images (B, 3, H, W) to the logits of their patches (B, classes, H / patch, W / patch)
Masks = Callable[[Tensor], Tensor]


def multi_scale(model: Masks, images: Tensor, scales: Iterable[float], patch: int, pixels: Sequence[int]) -> Tensor:
    """Return the share of each class at `pixels` (rows, columns) of images (B, 3, H, W): (B, classes, rows, columns).

    Every scale is seen as it is and mirrored, and the shares are averaged (Strudel et al. 2021, arXiv 2105.05633).
    Scaled sizes are whole patches; what is larger than H × W is seen through windows of that size.
    """
    size = images.shape[2:]
    found = []
    for scale in scales:
        scaled_size = [max(1, round(scale * side / patch)) * patch for side in size]
        scaled = F.interpolate(images, scaled_size, mode="bilinear", antialias=True)
        for mirrored in (False, True):
            masks = through_windows(model, scaled.flip(3) if mirrored else scaled, size, patch)
            found.append(at_pixels(masks.flip(3) if mirrored else masks, pixels).softmax(1))
    return torch.stack(found).mean(0)


def through_windows(model: Masks, images: Tensor, window: Sequence[int], patch: int) -> Tensor:
    """Return the logits of all patches of images seen through windows of `window` pixels, averaged where these overlap.

    Windows begin at whole patches, at most half a window apart, so that patches of all windows fall together.
    """
    grid, part = [side // patch for side in images.shape[2:]], [side // patch for side in window]
    places = list(product(*(window_starts(*sides) for sides in zip(grid, part, strict=True))))
    seen = images.new_zeros(grid)
    total: Tensor | float = 0.0
    for top, left in places:
        rows, columns = slice(top, top + part[0]), slice(left, left + part[1])
        whole = slice(top * patch, (top + part[0]) * patch), slice(left * patch, (left + part[1]) * patch)
        masks = model(images[:, :, whole[0], whole[1]])
        beyond = (left, grid[1] - left - masks.shape[3], top, grid[0] - top - masks.shape[2])
        total = total + F.pad(masks, beyond)
        seen[rows, columns] += 1
    return total / seen


def window_starts(whole: int, part: int) -> list[int]:
    """Return where windows of `part` begin on a side of `whole`: evenly, the first at the start and the last at the
    end."""
    if whole <= part:
        return [0]
    steps = -(-2 * (whole - part) // part)
    return [round(step * (whole - part) / steps) for step in range(steps + 1)]


def at_pixels(masks: Tensor, pixels: Sequence[int]) -> Tensor:
    """Interpolate the logits of patches to so many rows and columns."""
    return F.interpolate(masks, tuple(pixels), mode="bilinear")
