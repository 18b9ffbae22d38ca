"""Candidate: one attention-like module of a model, and the adapter by which a host can stand in its attention."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.attention.fitted_layer import Adapter
from headwise.core.site import Site


@dataclass
class Candidate:
    """An attention-like module: reachable by an adapter, or not and why."""

    site: Site
    adapter: Adapter | None
    reason: str = ""
