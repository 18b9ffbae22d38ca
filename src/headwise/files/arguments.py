"""Checks of public arguments, where they enter: each error names the argument, what it takes and what it got."""

from __future__ import annotations

import math
import os
import reprlib
from typing import Any


def is_a(name: str, value: Any, kinds: type | tuple[type, ...], words: str) -> None:
    """Raise TypeError if a value is of none of these classes; `words` says what the argument takes."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise TypeError(f"{name} must be {words}, got {reprlib.repr(value)}")


def is_path(name: str, value: Any) -> None:
    """Raise TypeError if a value is not a path."""
    is_a(name, value, (str, os.PathLike), "a path")


def is_function(name: str, value: Any, words: str = "a function or None") -> None:
    """Raise TypeError if a value is neither None nor callable."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be {words}, got {reprlib.repr(value)}")


def finite_number(name: str, value: Any) -> None:
    """Raise TypeError if a value is not a number, and ValueError if it is negative, infinite or NaN."""
    is_a(name, value, (int, float), "a number")
    if value < 0:
        raise ValueError(f"{name} must be at least 0, got {value}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
