"""The fifteen corruptions of CIFAR-10-C at five severities (Hendrycks & Dietterich 2019, arXiv 1903.12261).

They follow the paper and the constants of the program that made CIFAR-10-C; no pixel of that data set is used. Where
the program differs from the paper, the program is followed, because the published figures are of its images: the glass
blur copies a neighbouring pixel instead of swapping two, and the mean change of glass, frost and elastic does not grow
with every severity.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from headwise_papers.data.corruptions import blur, digital, noise, weather

# images (N, 32, 32, 3) as bytes, the severity's constant, and the generator -> the same shape in [0, 255], not yet
# truncated to bytes
Corrupt = Callable[..., np.ndarray]

SEVERITIES = (1, 2, 3, 4, 5)
SIDE = 32

# the paper's order: noise, blur, weather, digital; each with its constant by severity
CONSTANTS: dict[str, tuple[Corrupt, tuple[Any, ...]]] = {
    # deviation
    "gaussian_noise": (noise.gaussian, (0.04, 0.06, 0.08, 0.09, 0.10)),
    # photons at full brightness
    "shot_noise": (noise.shot, (500, 250, 100, 75, 50)),
    # share of values
    "impulse_noise": (noise.impulse, (0.01, 0.02, 0.03, 0.05, 0.07)),
    # radius of the disk, deviation of its own blur
    "defocus_blur": (blur.defocus, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))),
    # deviation, rounds
    "glass_blur": (blur.glass, ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))),
    # radius, deviation
    "motion_blur": (blur.motion, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))),
    # where the zooms stop
    "zoom_blur": (blur.zoom, (1.06, 1.11, 1.16, 1.21, 1.26)),
    # mean, deviation, zoom and threshold of the flakes, radius and deviation of their motion, share of the image's own
    # brightness
    "snow": (
        weather.snow,
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
    ),
    # share of the image, share of the frost
    "frost": (weather.frost, ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))),
    # thickness, decay of its roughness
    "fog": (weather.fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))),
    "brightness": (weather.brightness, (0.05, 0.1, 0.15, 0.2, 0.3)),
    "contrast": (digital.contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
    # in pixels: length of the waves' shifts, their smoothness, largest shift of the corners
    "elastic_transform": (
        digital.elastic,
        ((0, 0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96)),
    ),
    # share of the side
    "pixelate": (digital.pixelate, (0.95, 0.9, 0.85, 0.75, 0.65)),
    # quality
    "jpeg_compression": (digital.jpeg, (80, 65, 58, 50, 40)),
}
CORRUPTIONS = tuple(CONSTANTS)


def corrupt(
    images: np.ndarray, name: str, severity: int, *, seed: int, photographs: list[np.ndarray] | None = None
) -> np.ndarray:
    """Return images (N, 32, 32, 3) uint8 in red, green, blue with a corruption; the same seed gives the same bytes.

    `photographs` are those of `data.frost`, needed for frost only. Each corruption and severity has its own random
    numbers. Raises ValueError for an unknown corruption or severity and for other images.
    """
    if name not in CONSTANTS:
        raise ValueError(f"There is no corruption {name!r}; the corruptions are {', '.join(CORRUPTIONS)}.")
    if severity not in SEVERITIES:
        raise ValueError(f"severity {severity}: the severities are {', '.join(map(str, SEVERITIES))}.")
    if images.dtype != np.uint8 or images.shape[1:] != (SIDE, SIDE, 3):
        raise ValueError(f"images {images.dtype} {images.shape}: bytes of shape (N, {SIDE}, {SIDE}, 3) are corrupted.")
    if not len(images):
        return images.copy()
    function, constants = CONSTANTS[name]
    if function is weather.frost:
        if not photographs:
            raise ValueError("frost blends photographs into images: pass photographs=frost.read(folder).")
        function = functools.partial(weather.frost, photographs=photographs)
    draws = np.random.default_rng([seed, CORRUPTIONS.index(name), severity])
    # truncated to bytes, not rounded, as in CIFAR-10-C
    return np.clip(function(images, constants[severity - 1], draws), 0, 255).astype(np.uint8)
