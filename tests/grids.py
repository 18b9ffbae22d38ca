"""The part of a grid that every test run covers; `make test-all` also covers the rest."""

from collections.abc import Collection, Iterable

import pytest


def part_of_grid(values: Iterable, kept: Collection) -> list:
    """Return all values as parameters, those that are not kept marked `grid`; a tuple means several arguments."""
    values = list(values)
    # a name that is spelt otherwise would leave every run but that of the grid in silence
    lost = [one for one in kept if one not in values]
    assert not lost, f"kept, but not among the values: {lost}"
    return [value if value in kept else pytest.param(*_several(value), marks=pytest.mark.grid) for value in values]


def requested(request, *names):
    """Return the parameters of the chosen tests of a module fixture's file that have all these names, so that it
    does not compute others."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    found = [tuple(item.callspec.params.get(name) for name in names) for item in items]
    return sorted({one for one in found if None not in one})


def _several(value):
    return value if isinstance(value, tuple) else (value,)
