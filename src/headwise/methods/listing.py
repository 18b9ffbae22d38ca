"""List the methods of the registry for `headwise methods`."""

from __future__ import annotations


def print_methods() -> None:
    """Print each method with its settings, what it does in one line, and its paper."""
    from headwise import methods  # noqa: F401  (its import fills the registry)
    from headwise.core.method import REGISTRY

    for name in sorted(REGISTRY):
        print(f"{REGISTRY[name]()!r}\n    {REGISTRY[name].summary()}\n    {REGISTRY[name].paper}")
