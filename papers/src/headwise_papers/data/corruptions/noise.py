"""Noise: of a sensor in little light, of counted photons, of broken pixels."""

from __future__ import annotations

import numpy as np


def gaussian(images: np.ndarray, deviation: float, draws: np.random.Generator) -> np.ndarray:
    """Add normal noise of this deviation to values in [0, 1]."""
    return 255 * np.clip(images / 255 + draws.normal(scale=deviation, size=images.shape), 0, 1)


def shot(images: np.ndarray, photons: float, draws: np.random.Generator) -> np.ndarray:
    """Count photons, whose number is Poisson and at full brightness `photons` in the mean."""
    return 255 * np.clip(draws.poisson(images / 255 * photons) / photons, 0, 1)


def impulse(images: np.ndarray, share: float, draws: np.random.Generator) -> np.ndarray:
    """Set this share of all values to 0 or to full brightness, each as often."""
    hit = draws.random(images.shape) < share
    return np.where(hit, 255 * draws.integers(2, size=images.shape), images)
