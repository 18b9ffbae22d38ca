"""Warnings that point at the user's line: the nearest one outside headwise and the libraries that call it."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

# packages through which a user's line reaches headwise: a hook of torch, a callback of a trainer
BETWEEN = frozenset(
    "headwise headwise_papers headwise_verdict torch transformers accelerate peft trl axolotl lightning "
    "pytorch_lightning lightning_fabric swift llamafactory contextlib functools".split()
)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the nearest line outside `BETWEEN`, or at the outermost one if there is none."""
    frame: FrameType = sys._getframe(1)
    while frame.f_back is not None and _is_between(frame):
        frame = frame.f_back
    place = frame.f_globals
    warnings.warn_explicit(
        text,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        place.get("__name__", "<string>"),
        place.setdefault("__warningregistry__", {}),
    )


def _is_between(frame: FrameType) -> bool:
    # code that torch generates has a file of this name
    generated = frame.f_code.co_filename.startswith("<eval_with_key>")
    return generated or frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN
