"""Candidate: one attention-like module of a model, and the adapter by which a host can stand in its attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headwise.core.site import Site
from headwise.hosts.layers.hosted_site import HostedSite


class Adapter(Protocol):
    """Stands in one site's attention. `attach` may not fail half-way; `detach` leaves no trace."""

    def attach(self, fitted: HostedSite) -> None:
        """Route the site's calls through `fitted`."""

    def detach(self) -> None:
        """Give the site back as it was."""


@dataclass
class Candidate:
    """An attention-like module: reachable by an adapter, or not and why."""

    site: Site
    adapter: Adapter | None
    reason: str = ""
