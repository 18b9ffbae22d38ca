"""SpecAugment: masks over bands of frequencies and stretches of time (Park et al. 2019, arXiv 1904.08779)."""

from __future__ import annotations

import torch
from torch import Tensor


def spec_augment(
    features: Tensor,
    lengths: Tensor,
    generator: torch.Generator,
    *,
    bands: int,
    band: int,
    stretches: int,
    stretch: int,
    share: float,
) -> Tensor:
    """Return features (B, T, F) with masked parts set to 0, the mean of normalised features; without time warping.

    There are `bands` masks of 0 to `band` coefficients each, and `stretches` masks of 0 to `stretch` frames each, at
    most `share` of an utterance's own frames (`lengths`). Random numbers are drawn on the CPU from `generator`.
    """
    lengths = lengths.cpu()
    count, _, coefficients = features.shape
    hidden_bands = _masks(
        torch.full((count,), coefficients), torch.full((count,), band), bands, coefficients, generator
    )
    longest = (share * lengths).long().clamp(max=stretch)
    hidden_times = _masks(lengths, longest, stretches, features.shape[1], generator)
    masked = hidden_bands[:, None, :] | hidden_times[:, :, None]
    return features.masked_fill(masked.to(features.device), 0.0)


def _masks(sizes: Tensor, most: Tensor, number: int, places: int, generator: torch.Generator) -> Tensor:
    """Return a mask (B, places), True in `number` stretches of 0 to `most` (B,) of the first `sizes` (B,) places."""
    draws = torch.rand(2, number, len(sizes), generator=generator)
    width = (draws[0] * (most.clamp(max=sizes) + 1)).long()
    start = (draws[1] * (sizes - width + 1)).long()
    at = torch.arange(places)
    inside = (at >= start[..., None]) & (at < (start + width)[..., None])
    return inside.any(0)
