"""The fitted sites that are alive, by number: compiled graphs hold the number, never the site."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

from headwise.core.site import Site


class LiveSite(Protocol):
    """A site that something stands on, until it is let go."""

    alive: bool

    @property
    def site(self) -> Site:
        """Give the site."""
        ...


# Weak: a site that nobody holds any more is gone, and a number is never given twice.
_numbers = itertools.count(1)
_live: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def enroll(fitted: LiveSite) -> int:
    """Give a fitted site the number by which compiled graphs find it."""
    number = next(_numbers)
    _live[number] = fitted
    return number


def numbered(number: int) -> Any:
    """Give the fitted site of a number."""
    return _live[number]


def live_sites() -> list[Any]:
    """Give the fitted sites that are still in use."""
    return [fitted for fitted in _live.values() if fitted.alive]
