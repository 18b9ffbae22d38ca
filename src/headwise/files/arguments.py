"""Checks of public arguments, where they enter: each error names the argument, what it takes and what it got."""

from __future__ import annotations

import functools
import inspect
import math
import os
import reprlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
# Arguments by the names that other libraries use for them, and what to write.
ELSEWHERE = {
    "where": (
        ("layers", "layer", "sites", "modules", "target_modules", "only", "include", "exclude", "filter"),
        'choose layers with where=["name", ...] or where=lambda site: site.depth < 4; headwise.sites(model) lists them',
    ),
    "example": (("batch", "inputs", "example_inputs", "sample"), "pass a batch as example=batch"),
    "seed": (("generator", "random_state"), "methods draw by seed=0"),
    "methods": (
        ("method", "regularizers"),
        "methods come after the model: regularize(model, headwise.DropHead(p=0.2))",
    ),
}


def suggesting(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function whose TypeError for an unknown keyword says which of its arguments to use."""
    parameters = inspect.signature(function).parameters
    named = {name for name, one in parameters.items() if one.kind is not one.VAR_POSITIONAL}
    known = [name for name in parameters if name != "self"]

    @functools.wraps(function)
    def checked(*args: P.args, **keywords: P.kwargs) -> R:
        for name in keywords:
            if name not in named:
                meant = [
                    remedy for argument, (names, remedy) in ELSEWHERE.items() if argument in known and name in names
                ]
                remedy = meant[0] if meant else f"its arguments: {', '.join(known)}"
                shown = function.__qualname__.removesuffix(".__init__")
                raise TypeError(f"{shown}() has no argument {name!r}: {remedy}")
        return function(*args, **keywords)

    return checked


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
