"""Settings: checks of a method's fields against the types that its class declares."""

from __future__ import annotations

import dataclasses
import math
import sys
import types
import typing
from typing import Any

from headwise.attend.core.schedule import Schedule, number
from headwise.files.errors import suggest


def declared_types(cls: type) -> dict[str, frozenset[Any]]:
    """Return the types that each field of a dataclass may hold: `int | None` gives int and NoneType."""
    fields = {field.name: field.type for field in dataclasses.fields(cls)}
    # Only the fields: other annotations of the class may use names that are imported for type checkers only.
    holder = type(cls.__name__, (), {"__annotations__": fields})
    hints = typing.get_type_hints(holder, globalns=vars(sys.modules[cls.__module__]))
    return {name: _members(hint) for name, hint in hints.items()}


def _members(hint: Any) -> frozenset[Any]:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return frozenset(typing.get_args(hint) if union else (hint,))


def plain(value: Any, allowed: frozenset[Any]) -> Any:
    """Return a setting with numbers of other libraries as Python's own, and integers as floats where declared.

    So each method has one repr: DropHead(p=0) is DropHead(p=0.0).
    """
    value = number(value)
    whole = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if whole and float in allowed else value


def check_type(owner: str, field: dataclasses.Field[Any], value: Any, allowed: frozenset[Any], neutral: Any) -> None:
    """Raise TypeError or ValueError if a value does not have its field's type.

    The type is that of the default; fields whose default is None are left to the method's own `check`.

    Args:
        neutral: the neutral value of this field, or None; only this value may be infinite.
    """
    default, name = field.default, f"{owner}.{field.name}"
    if isinstance(default, bool) or isinstance(value, bool):
        # In Python, bool is a subclass of int.
        if isinstance(value, bool) != isinstance(default, bool) and default is not None:
            raise TypeError(f"{name} must be of type {field.type}, got {value!r}")
    elif isinstance(default, int | float):
        _check_number(name, value, allowed, neutral)
    elif isinstance(default, str) and not isinstance(value, str):
        raise TypeError(f"{name} must be a text, got {value!r}")


def _check_number(name: str, value: Any, allowed: frozenset[Any], neutral: Any) -> None:
    if value is None and type(None) in allowed:
        return
    if isinstance(value, Schedule):
        owner, _, setting = name.partition(".")
        raise TypeError(
            f"{name} must be a number, got {value!r}: set a schedule after the model is regularized, with "
            f"regularized.set({owner}, {setting}=...)"
        )
    if not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if float not in allowed and not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if math.isnan(value):
        raise ValueError(f"{name} must be a number, got nan")
    if math.isinf(value) and neutral != value:
        raise ValueError(f"{name} must be finite, got {value}")


def no_setting(owner: str, name: str, known: list[str]) -> str:
    """Return the message that a method has no setting of this name, with the nearest name and all known names."""
    return f"{owner} has no setting {name!r}.{suggest(name, known)} Its settings: {', '.join(known) or 'none'}."
