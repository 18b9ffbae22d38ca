"""Weather: snow, frost, fog, and brightness, which the paper counts as weather."""

from __future__ import annotations

import numpy as np

from headwise_papers.data.corruptions.blur import drag, zoom_in

# perceived brightness of red, green and blue (ITU-R BT.601)
LIGHTNESS = np.array([0.299, 0.587, 0.114])


def snow(
    images: np.ndarray, constant: tuple[float, float, float, float, int, int, float], draws: np.random.Generator
) -> np.ndarray:
    """Return whitened images with flakes that fall within 45 degrees of vertical, added also rotated by half a turn."""
    mean, deviation, zoom, threshold, radius, spread, own = constant
    count, side = len(images), images.shape[1]
    flakes = zoom_in(draws.normal(mean, deviation, (count, side, side, 1)), zoom)
    flakes = np.where(flakes < threshold, 0, np.clip(flakes, 0, 1))
    flakes = drag((255 * flakes).astype(np.uint8), radius, spread, draws.uniform(-135, -45, count))
    light = images / 255
    white = np.maximum(light, (light @ LIGHTNESS)[..., None] * 1.5 + 0.5)
    light = own * light + (1 - own) * white
    return 255 * np.clip(light + (flakes + flakes[:, ::-1, ::-1]) / 255, 0, 1)


def frost(
    images: np.ndarray, shares: tuple[float, float], draws: np.random.Generator, *, photographs: list[np.ndarray]
) -> np.ndarray:
    """Return images with a part of a photograph of frost, reduced to a fifth, added; as in CIFAR-10-C, the sixth
    photograph is never used."""
    side = images.shape[1]
    small = [_fifth(photograph) for photograph in photographs[:5]]
    if (least := min(min(photograph.shape[:2]) for photograph in small)) <= side:
        raise ValueError(
            f"a photograph of frost is {least} pixels wide or high at a fifth of its size: more than {side} are needed"
        )
    parts = []
    for _ in images:
        photograph = small[draws.integers(len(small))]
        row, column = (draws.integers(size - side) for size in photograph.shape[:2])
        parts.append(photograph[row : row + side, column : column + side])
    return np.clip(shares[0] * images + shares[1] * np.stack(parts), 0, 255)


def fog(images: np.ndarray, constant: tuple[float, float], draws: np.random.Generator) -> np.ndarray:
    """Return images with a cloud added, scaled to keep the brightest value; the cloud is a midpoint-displacement
    fractal."""
    thickness, decay = constant
    light = images / 255
    brightest = light.max(axis=(1, 2, 3), keepdims=True)
    clouds = plasma(len(images), images.shape[1], decay, draws)[..., None]
    return 255 * np.clip((light + thickness * clouds) * brightest / (brightest + thickness), 0, 1)


def brightness(images: np.ndarray, added: float, draws: np.random.Generator) -> np.ndarray:
    """Return images with a higher value (the largest of red, green and blue) at the same hue and saturation."""
    light = images / 255
    value = light.max(axis=-1, keepdims=True)
    raised = np.clip(value + added, 0, 1)
    # black has no hue and becomes grey
    grown = np.divide(light * raised, value, out=np.broadcast_to(raised, light.shape).copy(), where=value > 0)
    return 255 * np.clip(grown, 0, 1)


def plasma(count: int, side: int, decay: float, draws: np.random.Generator) -> np.ndarray:
    """Return clouds (count, side, side) in [0, 1] by the diamond-square algorithm on a torus; `side` is a power of two.

    Every new point is the mean of four old ones plus a uniform random number of up to the square of the wobble, which
    starts at 100 and is divided by `decay` with each halving of the step.
    """
    field = np.zeros((count, side, side))
    step, wobble = side, 100.0

    def moved(four: np.ndarray) -> np.ndarray:
        return four / 4 + wobble * draws.uniform(-wobble, wobble, four.shape)

    while step >= 2:
        half = step // 2
        corners = field[:, ::step, ::step]
        rows = corners + np.roll(corners, -1, 1)
        columns = corners + np.roll(corners, -1, 2)
        middles = moved(rows + np.roll(rows, -1, 2))
        field[:, half::step, half::step] = middles
        field[:, ::step, half::step] = moved(columns + middles + np.roll(middles, 1, 1))
        field[:, half::step, ::step] = moved(rows + middles + np.roll(middles, 1, 2))
        step, wobble = half, wobble / decay
    field -= field.min(axis=(1, 2), keepdims=True)
    return field / field.max(axis=(1, 2), keepdims=True)


def _fifth(photograph: np.ndarray) -> np.ndarray:
    """Return the middle pixel of every five by five, the result of linear interpolation without smoothing."""
    height, width = (round(size / 5) for size in photograph.shape[:2])
    return photograph[2::5, 2::5][:height, :width]
