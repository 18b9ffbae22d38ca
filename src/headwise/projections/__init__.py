"""Projections: which weights make the queries, keys, values and output of an attention layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from headwise.core.site import Site
from headwise.projections import named
from headwise.projections.block import Block, whole
from headwise.projections.perturbation import probed
from headwise.projections.probe import Unclear
from headwise.projections.projections import ProjectionError, Projections

__all__ = ["Block", "ProjectionError", "Projections", "of", "projections", "whole"]


def projections(site: Site, model: nn.Module | None = None, example: Any = None) -> Projections:
    """Find the q, k, v and o weights of a site.

    Separate projections are found by the names hosts give them; any other layout is verified on the site: rows are
    perturbed, and which of q, k and v, and which heads, move is seen. Modes, buffers and generators are put back, and
    weights bit for bit.

    Args:
        site: the attention layer.
        model: the model it belongs to; needed where the layer cannot be run alone.
        example: a batch for the model, where none can be made from its config.

    Raises:
        ProjectionError: naming the site, the reason and the remedy.
    """
    if isinstance(site.module, nn.MultiheadAttention):
        return named.multihead(site)
    parent = _parent(site, model)
    found = named.by_name(site, parent)
    reason = ""
    if {"q", "k", "v"} <= set(found):
        made = named.separate(site, found)
        if isinstance(made, Projections):
            return made
        reason = made
    try:
        return probed(site, model, example, parent)
    except Unclear as unclear:
        raise ProjectionError(f"{site.name} {reason or unclear}") from None


def of(site: Site) -> Projections:
    """Give the site's projections, found once and kept with the site.

    The model and the example are read from `site.model` and `site.example` where the core has put them.
    """
    kept = site.__dict__.get("found_projections")
    if kept is None:
        kept = projections(site, getattr(site, "model", None), getattr(site, "example", None))
        site.__dict__["found_projections"] = kept
        _tell(site, kept)
    return kept


def _tell(site: Site, found: Projections) -> None:
    """Write onto the site what it did not know of itself."""
    if found.q is not None and found.k is not None:
        site.heads = site.heads or found.q.heads
        site.kv_heads = site.kv_heads or found.k.heads
        site.head_dim = site.head_dim or found.q.head_dim
        site.hidden = site.hidden or found.q.weight().shape[1]


def _parent(site: Site, model: nn.Module | None) -> nn.Module | None:
    if model is None or not site.name:
        return None
    try:
        return model.get_submodule(site.name.rpartition(".")[0])
    except AttributeError:
        return None
