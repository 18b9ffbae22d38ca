"""The door of a room: the names that other rooms take from it, each imported from its module on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def door(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """Return the `__getattr__` and the `__all__` of a package from its names, each with its module in the package.

    The package itself stays importable in an instant, and by modules inside it that its names lead to.
    """

    def resolve(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return resolve, sorted(modules)
