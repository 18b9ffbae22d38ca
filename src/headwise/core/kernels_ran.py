"""Kernels ran: which ways of computing attention served the calls of a site so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class KernelsRan:
    """Which ways of computing attention ran so far.

    Compiled graphs write these fields too. Each stands there from the start and is only ever written by the
    computation: a field that a graph never reads compiles without a guard, while a set that grows would be read, and
    compiled again.
    """

    explicit: bool = False
    fused: bool = False
    fused_wider: bool = False
    row_statistics: bool = False
    own_map: bool = False
    host: bool = False

    def names(self) -> tuple[str, ...]:
        """Return the names that reports show, sorted."""
        shown = {
            "explicit": self.explicit,
            "fused": self.fused,
            "fused, one coordinate wider": self.fused_wider,
            "rows": self.row_statistics,
            "a map of its own": self.own_map,
            "the host's": self.host,
        }
        return tuple(name for name, ran in shown.items() if ran)
