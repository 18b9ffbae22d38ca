"""The entry points by which installed packages add methods, statistics, tasks and studies."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import Any, Literal

Group = Literal[
    "headwise.methods",
    "headwise.statistics",
    "headwise.tasks",
    "headwise.studies",
    "headwise.leagues",
    "headwise.commands",
]


@cache
def entry_points(group: Group) -> dict[str, metadata.EntryPoint]:
    """Return the entry points of a group by name, without importing what they name.

    Raises:
        ValueError: if two installed packages give the same name.
    """
    by_name: dict[str, metadata.EntryPoint] = {}
    for point in metadata.entry_points(group=group):
        other = by_name.setdefault(point.name, point)
        # an editable installation may be listed twice
        if other.value != point.value:
            raise ValueError(
                f"two installed packages call a {group.rpartition('.')[2]} entry {point.name!r}: {_package(other)} "
                f"({other.value}) and {_package(point)} ({point.value}). Uninstall one of them."
            )
    return by_name


def load(group: Group, name: str) -> Any:
    """Return the object of an entry point, imported.

    Raises:
        ImportError: if it cannot be imported; the message names the package.
    """
    point = entry_points(group)[name]
    try:
        return point.load()
    except Exception as error:
        raise ImportError(
            f"{name} of the package {_package(point)} cannot be loaded from {point.value} ({type(error).__name__}: "
            f"{error}). Repair or uninstall {_package(point)}."
        ) from error


def _package(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown package"
