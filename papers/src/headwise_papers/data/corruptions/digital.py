"""Digital: contrast, an elastic warp, coarse pixels, JPEG."""

from __future__ import annotations

import io

import numpy as np
from scipy import ndimage

from headwise.files.optional_imports import needing


def contrast(images: np.ndarray, share: float, draws: np.random.Generator) -> np.ndarray:
    """Pull every colour towards its mean over the image, so that this share of the distance stays."""
    light = images / 255
    mean = light.mean(axis=(1, 2), keepdims=True)
    return 255 * np.clip((light - mean) * share + mean, 0, 1)


def elastic(images: np.ndarray, constant: tuple[float, float, float], draws: np.random.Generator) -> np.ndarray:
    """Warp by a random affine map that moves three points, and then by smooth waves; linear interpolation."""
    length, smoothness, shift = constant
    side = images.shape[1]
    grid = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="ij")).astype(float)
    warped = []
    for image in images:
        matrix, start = _affine(side, shift, draws)
        places = np.tensordot(matrix, grid, 1) + start[:, None, None]
        found = _sampled(image.astype(float), places, "mirror")
        waves = draws.uniform(-1, 1, (2, side, side))
        waves = length * ndimage.gaussian_filter(waves, (0, smoothness, smoothness), mode="reflect", truncate=3)
        warped.append(_sampled(found, grid + waves, "reflect"))
    return np.stack(warped)


def pixelate(images: np.ndarray, share: float, draws: np.random.Generator) -> np.ndarray:
    """Make the image smaller to this share of its side, and large again, each by the mean over boxes."""
    with needing("Coarse pixels", "study"):
        from PIL import Image
    side = images.shape[1]
    small, large = (int(share * side),) * 2, (side, side)
    box = Image.Resampling.BOX
    return np.stack([np.asarray(Image.fromarray(image).resize(small, box).resize(large, box)) for image in images])


def jpeg(images: np.ndarray, quality: int, draws: np.random.Generator) -> np.ndarray:
    """Pack as JPEG of this quality, and unpack."""
    with needing("JPEG", "study"):
        from PIL import Image
    found = []
    for image in images:
        packed = io.BytesIO()
        Image.fromarray(image).save(packed, "JPEG", quality=quality)
        found.append(np.asarray(Image.open(packed)))
    return np.stack(found)


def _affine(side: int, shift: float, draws: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw the map from a pixel of the result to its place in the image, as (row, column): a matrix and a start.

    Three points around the middle, a third of the side away, move by up to `shift` pixels each way.
    """
    middle, third = side // 2, side // 3
    before = np.array([[1, 1], [-1, 1], [-1, -1]]) * third + middle
    after = before + draws.uniform(-shift, shift, before.shape)
    solved = np.linalg.solve(np.column_stack([after, np.ones(3)]), before)
    return solved[:2].T, solved[2]


def _sampled(image: np.ndarray, places: np.ndarray, mode: str) -> np.ndarray:
    """Read an image (S, S, C) at places (2, S, S) by linear interpolation."""
    return np.stack(
        [ndimage.map_coordinates(channel, places, order=1, mode=mode) for channel in image.transpose(2, 0, 1)], -1
    )
