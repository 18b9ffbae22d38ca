"""Candidate: an attention-like module of a model, with the adapter that a host uses to route its attention."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.attention.fitted_layer import Adapter
from headwise.core.site import Site


@dataclass
class Candidate:
    """An attention-like module: its adapter, or None and the reason why it cannot be reached."""

    site: Site
    adapter: Adapter | None
    reason: str = ""
