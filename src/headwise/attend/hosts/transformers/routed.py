"""The protocol of a routed module, and the constants that the modules of this host share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.core import Site

# Our name among transformers' attention implementations, and the attribute of a routed module with its adapter.
KEY = "headwise"
PLACE = "_headwise"
# Implementations with masks (B, 1, T, N), which headwise computes itself. All others are kernels, which still run:
# methods act before and after them.
PLAIN = ("eager", "sdpa")


# Separates sequences only by its mask, which includes the positions.
FLEX = "flex_attention"


def is_flash(implementation: str) -> bool:
    """Return whether an implementation separates sequences as flash kernels do: by padding, bounds or positions."""
    return "flash" in implementation


class ModuleAdapter(Protocol):
    """The adapter of an attention module that is routed to headwise.

    Attributes:
        asked: the host's implementation when the module was routed.
        config: the config that the module shares with its model.
        fitted: the fitted layer; None while there is none.
        cache: the cache of the running forward, if it has one.
        verified: the eager implementation or kernel whose result was last compared with the core's.
    """

    site: Site
    config: Any
    asked: str
    fitted: FittedLayer | None
    cache: Any
    verified: str

    @property
    def implementation(self) -> str:
        """Return the name of the host's own implementation."""
        ...

    @property
    def plain(self) -> bool:
        """Return whether that is transformers' own eager or sdpa attention, which headwise computes itself."""
        ...

    def original(self) -> Callable[..., Any]:
        """Return the host's own attention function."""
        ...
