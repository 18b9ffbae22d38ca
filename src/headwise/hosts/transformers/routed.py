"""The module whose calls come through transformers' attention interface, as the parts of this host see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from headwise.attention.fitted_layer import FittedLayer
from headwise.core.site import Site

# Our name among transformers' attention implementations, and where a routed module keeps its adapter.
KEY = "headwise"
PLACE = "_headwise"


class Routed(Protocol):
    """An attention module that was routed to headwise: its site, what stands on it, and what it used before.

    Attributes:
        fitted: what stands on the site now; None while nothing does.
        cache: the cache of the forward that runs now, where one was given.
        verified: whether an eager implementation of the module's own was compared with the textbook.
    """

    site: Site
    fitted: FittedLayer | None
    cache: Any
    verified: bool

    @property
    def implementation(self) -> str:
        """Return the name of the host's own implementation."""
        ...

    def original(self) -> Callable[..., Any]:
        """Return the host's own attention function."""
        ...
