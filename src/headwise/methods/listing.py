"""List the methods of the registry for `headwise methods`."""

from __future__ import annotations

from headwise.core.method import REGISTRY
from headwise.files.entry_points import entry_points
from headwise.methods.text import find


def print_methods() -> None:
    """Print each method with its settings, what it does in one line, and its paper."""
    for name in sorted({*REGISTRY, *entry_points("headwise.methods")}):
        find(name)
        print(f"{REGISTRY[name]()!r}\n    {REGISTRY[name].summary()}\n    {REGISTRY[name].paper}")
