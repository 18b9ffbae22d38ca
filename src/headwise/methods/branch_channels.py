"""How wide the branch is that leaves an attention layer."""

from __future__ import annotations

from headwise import projections
from headwise.core.site import Site
from headwise.projections import ProjectionError


def branch_channels(site: Site, method: str) -> int:
    """Return the channels that leave the layer: in hierarchical models not always those that enter it."""
    try:
        return projections.output(site, method).width
    except ProjectionError:
        assert site.hidden is not None  # the plan refuses sites without what `shapes` names
        return site.hidden
