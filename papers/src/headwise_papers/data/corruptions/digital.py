"""Digital corruptions: contrast, elastic transform, pixelation and JPEG compression."""

from __future__ import annotations

import io

import numpy as np
from scipy import ndimage

from headwise.files.optional_imports import needing


def contrast(images: np.ndarray, share: float, draws: np.random.Generator) -> np.ndarray:
    """Return images with every colour's distance from its mean over the image reduced to this share."""
    light = images / 255
    mean = light.mean(axis=(1, 2), keepdims=True)
    return 255 * np.clip((light - mean) * share + mean, 0, 1)


def elastic(images: np.ndarray, constant: tuple[float, float, float], draws: np.random.Generator) -> np.ndarray:
    """Return images warped by a random affine map of three points, then by smooth waves, with linear interpolation."""
    length, smoothness, shift = constant
    side = images.shape[1]
    grid = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="ij")).astype(float)
    warped = []
    for image in images:
        matrix, start = _affine(side, shift, draws)
        places = np.tensordot(matrix, grid, 1) + start[:, None, None]
        mapped = _sampled(image.astype(float), places, "mirror")
        waves = draws.uniform(-1, 1, (2, side, side))
        waves = length * ndimage.gaussian_filter(waves, (0, smoothness, smoothness), mode="reflect", truncate=3)
        warped.append(_sampled(mapped, grid + waves, "reflect"))
    return np.stack(warped)


def pixelate(images: np.ndarray, share: float, draws: np.random.Generator) -> np.ndarray:
    """Return images reduced to this share of their side and enlarged again, both by box filters."""
    with needing("Coarse pixels", "study"):
        from PIL import Image
    side = images.shape[1]
    small, large = (int(share * side),) * 2, (side, side)
    box = Image.Resampling.BOX
    return np.stack([np.asarray(Image.fromarray(image).resize(small, box).resize(large, box)) for image in images])


def jpeg(images: np.ndarray, quality: int, draws: np.random.Generator) -> np.ndarray:
    """Return images after JPEG compression of this quality."""
    with needing("JPEG", "study"):
        from PIL import Image
    decoded = []
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=quality)
        decoded.append(np.asarray(Image.open(buffer)))
    return np.stack(decoded)


def _affine(side: int, shift: float, draws: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return a random map, as matrix and offset, from a pixel (row, column) of the result to its position in the image.

    Three points around the middle, a third of the side away, move by up to `shift` pixels in each direction.
    """
    middle, third = side // 2, side // 3
    before = np.array([[1, 1], [-1, 1], [-1, -1]]) * third + middle
    after = before + draws.uniform(-shift, shift, before.shape)
    solved = np.linalg.solve(np.column_stack([after, np.ones(3)]), before)
    return solved[:2].T, solved[2]


def _sampled(image: np.ndarray, places: np.ndarray, mode: str) -> np.ndarray:
    """Return an image (S, S, C) sampled at positions (2, S, S) by linear interpolation."""
    return np.stack(
        [ndimage.map_coordinates(channel, places, order=1, mode=mode) for channel in image.transpose(2, 0, 1)], -1
    )
