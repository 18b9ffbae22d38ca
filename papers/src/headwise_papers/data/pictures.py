"""Read pictures by name, with Pillow."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headwise.files.optional_imports import needing
from headwise.study import StudyError
from headwise_papers.data.text_files import AGAIN


def read_picture(path: Path, size: tuple[int, int] | None = None, *, gray: bool = False) -> np.ndarray:
    """Read a picture into (H, W, 3) uint8 in red, green, blue, or with `gray` into (H, W); `size` is (W, H) in pixels.

    Raises StudyError that names a file which is absent, no picture, of another size, or not gray where it must be.
    """
    with needing("Reading pictures", "study"):
        from PIL import Image, UnidentifiedImageError
    try:
        with Image.open(path) as picture:
            if size is not None and picture.size != size:
                raise StudyError(f"{path} is {picture.size} pixels where {size} must stand. {AGAIN}")
            if gray and picture.mode not in ("L", "P"):
                raise StudyError(f"{path} holds colours ({picture.mode}) where numbers of classes must stand. {AGAIN}")
            return np.asarray(picture if gray else picture.convert("RGB"))
    except FileNotFoundError as error:
        raise StudyError(f"{path} is missing. {AGAIN.replace('Delete it and start', 'Start')}") from error
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise StudyError(f"{path} is no picture: {error}. {AGAIN}") from error
