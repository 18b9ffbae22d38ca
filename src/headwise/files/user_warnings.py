"""Warnings that point at the user's line: the nearest one outside headwise and the libraries that call it."""

from __future__ import annotations

import warnings
from types import FrameType

from headwise.files.callers import callers

# packages through which a user's line reaches headwise: a hook of torch, a callback of a trainer
BETWEEN = frozenset(
    "headwise headwise_papers headwise_verdict torch transformers accelerate peft trl axolotl lightning "
    "pytorch_lightning lightning_fabric swift llamafactory contextlib functools".split()
)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the nearest line outside `BETWEEN`, or at the outermost one if there is none."""
    for frame in callers():
        if not _is_between(frame):
            break
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
