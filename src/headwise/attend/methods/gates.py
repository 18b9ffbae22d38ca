"""Learned sigmoid gates: where they start, and the random projections of low-rank ones."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attend.core import random_draws

# The first gates: σ(4) with a bias of 4, σ(0), and 2σ(0), which is exactly 1.
STARTS = ("open", "half", "one")


def factor_of(start: str) -> float:
    """Return the factor of gates that start so."""
    return 2.0 if start == "one" else 1.0


def drawn(shape: tuple[int, ...], seed: int, *names: str | int) -> Tensor:
    """Return normal numbers (..., in) with variance 1/in, which depend on the seed and names alone."""
    key = random_draws.mix(*names, seed)
    return random_draws.normal(key, 0, shape, torch.device("cpu")) * shape[-1] ** -0.5
