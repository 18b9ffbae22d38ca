"""Blur: defocus, frosted glass, motion and zoom."""

from __future__ import annotations

import numpy as np
from scipy import ndimage


def defocus(images: np.ndarray, disk: tuple[float, float], draws: np.random.Generator) -> np.ndarray:
    """Return the average over a disk of this radius in pixels, its edge smoothed by a normal filter of 3 pixels."""
    radius, softness = disk
    reach = int(radius) + 1
    rows, columns = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    kernel = (rows**2 + columns**2 <= radius**2).astype(float)
    rim = np.exp(-(np.arange(-1, 2) ** 2) / (2 * softness**2))
    for axis in (0, 1):
        kernel = ndimage.convolve1d(kernel, rim / rim.sum(), axis, mode="constant")
    return ndimage.correlate(images.astype(float), kernel[None, :, :, None] / kernel.sum(), mode="mirror")


def glass(images: np.ndarray, constant: tuple[float, int], draws: np.random.Generator) -> np.ndarray:
    """Return blurred images with every pixel replaced by itself or a neighbour above or left, and blurred again.

    The paper swaps the two pixels; the program that made CIFAR-10-C copies one, from the lower right on, as done here.
    """
    deviation, rounds = constant
    blurred = _smooth(images / 255, deviation)
    blurred = (255 * blurred).astype(np.uint8)
    count, side = blurred.shape[:2]
    every = np.arange(count)
    for _ in range(rounds):
        for row in range(side - 1, 1, -1):
            for column in range(side - 1, 1, -1):
                up, left = draws.integers(2, size=(2, count))
                blurred[:, row, column] = blurred[every, row - up, column - left]
    return 255 * _smooth(blurred / 255, deviation)


def motion(images: np.ndarray, constant: tuple[float, float], draws: np.random.Generator) -> np.ndarray:
    """Return images with motion blur along a direction within 45 degrees of horizontal."""
    return drag(images, *constant, draws.uniform(-45, 45, len(images)))


def zoom(images: np.ndarray, stop: float, draws: np.random.Generator) -> np.ndarray:
    """Return the average of the image and its enlargements by 1, 1.01, ... to `stop`, included or not by rounding."""
    stack = [images.astype(float), *(zoom_in(images, factor) for factor in np.arange(1, stop, 0.01))]
    return np.mean(stack, axis=0)


def drag(images: np.ndarray, radius: float, deviation: float, degrees: np.ndarray) -> np.ndarray:
    """Return images (N, S, S, C) averaged along a direction each, with one-sided normal weights and repeated edges.

    It is the motion blur of ImageMagick: 2·radius + 1 steps of one pixel each, rounded to pixels, and the result
    truncated to bytes.
    """
    steps = np.arange(2 * int(np.ceil(radius)) + 1)
    weights = np.exp(-(steps**2) / (2 * deviation**2))
    weights /= weights.sum()
    # half a pixel rounds down
    rows, columns = (np.ceil(np.outer(turn(np.deg2rad(degrees)), steps) - 0.5).astype(int) for turn in (np.sin, np.cos))
    side = images.shape[1]
    place, every = np.arange(side), np.arange(len(images))[:, None, None]
    total = np.zeros(images.shape)
    for step, weight in enumerate(weights):
        row = np.clip(place + rows[:, step, None], 0, side - 1)[:, :, None]
        column = np.clip(place + columns[:, step, None], 0, side - 1)[:, None, :]
        total += weight * images[every, row, column]
    return np.floor(total)


def zoom_in(images: np.ndarray, factor: float) -> np.ndarray:
    """Return the middle of images (N, S, S, C), enlarged by linear interpolation and cropped to their size."""
    side = images.shape[1]
    part = int(np.ceil(side / factor))
    large = round(part * factor)
    # the first and last pixel of the middle stay at the edges
    place = np.linspace(0, part - 1, large)[(large - side) // 2 :][:side]
    below = np.minimum(place.astype(int), part - 2)
    weights = np.zeros((side, side))
    start = (side - part) // 2
    weights[np.arange(side), start + below] = 1 - (place - below)
    weights[np.arange(side), start + below + 1] = place - below
    rows = weights @ images.reshape(len(images), side, -1).astype(float)
    return weights @ rows.reshape(images.shape)


def _smooth(images: np.ndarray, deviation: float) -> np.ndarray:
    """Return images after a normal filter of this deviation in pixels, truncated at four, with repeated edges."""
    return ndimage.gaussian_filter(images, (0, deviation, deviation, 0), mode="nearest", truncate=4)
