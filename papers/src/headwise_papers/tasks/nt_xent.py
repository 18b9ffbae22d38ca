"""NT-Xent: each view of an image finds the other among all views of a batch (Chen et al. 2020, arXiv 2002.05709)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def similarities(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines (2B, 2B) of all views, -inf on the diagonal, and the index (2B,) of each view's partner."""
    views = nn.functional.normalize(torch.cat([one, other]).float(), dim=-1)
    itself = torch.eye(len(views), dtype=torch.bool, device=views.device)
    partner = torch.arange(len(views), device=views.device).roll(len(one))
    return (views @ views.T).masked_fill(itself, -torch.inf), partner


def nt_xent(one: Tensor, other: Tensor, temperature: float) -> Tensor:
    """Return the mean loss over 2B projected views (B, D) and (B, D), in nats."""
    cosines, partner = similarities(one, other)
    return nn.functional.cross_entropy(cosines / temperature, partner)


def found(one: Tensor, other: Tensor) -> Tensor:
    """Return the share of views whose nearest view is their partner, in [0, 1]."""
    cosines, partner = similarities(one, other)
    return (cosines.argmax(1) == partner).float().mean()
