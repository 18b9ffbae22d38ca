"""Noise: Gaussian, shot and impulse."""

from __future__ import annotations

import numpy as np


def gaussian(images: np.ndarray, deviation: float, draws: np.random.Generator) -> np.ndarray:
    """Return images with normal noise of this deviation added to values in [0, 1]."""
    return 255 * np.clip(images / 255 + draws.normal(scale=deviation, size=images.shape), 0, 1)


def shot(images: np.ndarray, photons: float, draws: np.random.Generator) -> np.ndarray:
    """Return images as Poisson counts of photons, with a mean of `photons` at full brightness."""
    return 255 * np.clip(draws.poisson(images / 255 * photons) / photons, 0, 1)


def impulse(images: np.ndarray, share: float, draws: np.random.Generator) -> np.ndarray:
    """Return images with this share of all values set to 0 or full brightness, equally often."""
    hit = draws.random(images.shape) < share
    return np.where(hit, 255 * draws.integers(2, size=images.shape), images)
