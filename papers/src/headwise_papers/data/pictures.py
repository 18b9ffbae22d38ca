"""Reading of pictures with Pillow."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headwise.files.optional_imports import needing
from headwise.study import StudyError
from headwise_papers.data.text_files import AGAIN


def read_picture(path: Path, size: tuple[int, int] | None = None, *, gray: bool = False) -> np.ndarray:
    """Return a picture as (H, W, 3) uint8 in red, green, blue, or with `gray` as (H, W).

    `size` is the required (W, H) in pixels. Raises StudyError naming a file that is missing, not a picture, of another
    size, or in colour with `gray`.
    """
    with needing("Reading pictures", "study"):
        from PIL import Image, UnidentifiedImageError
    try:
        with Image.open(path) as picture:
            if size is not None and picture.size != size:
                raise StudyError(f"{path} is {picture.size} pixels instead of {size}. {AGAIN}")
            if gray and picture.mode not in ("L", "P"):
                raise StudyError(f"{path} holds colours ({picture.mode}) instead of class numbers. {AGAIN}")
            return np.asarray(picture if gray else picture.convert("RGB"))
    except FileNotFoundError as error:
        raise StudyError(f"{path} is missing. {AGAIN.replace('Delete it and start', 'Start')}") from error
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise StudyError(f"{path} is not a picture: {error}. {AGAIN}") from error
