"""Find the projections of a site, separate or fused, by the names of its parts or by perturbing rows of weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from headwise.attend.core import Site
from headwise.attend.projections import named
from headwise.attend.projections.adapted import base_of, is_adapted, obstacle
from headwise.attend.projections.block import Block, ProjectionError
from headwise.attend.projections.latent import MAKES, latent_blocks
from headwise.attend.projections.leaves import Leaf
from headwise.attend.projections.named import with_context
from headwise.attend.projections.perturbation import Unclear, probed
from headwise.attend.projections.sharded import below
from headwise.attend.projections.site_projections import Projections


def find(site: Site, model: nn.Module | None = None, example: Any = None) -> Projections:
    """Find the q, k, v and o weights of a site.

    Separate projections are found by their names. Any other layout is verified on the site: rows of weights are
    perturbed to see which heads of q, k and v change. Modes, buffers and generators are restored, and weights bit for
    bit.

    Args:
        site: the attention layer.
        model: the model of the layer; needed if the layer cannot be run alone.
        example: a batch for the model; needed if none can be made from its config.

    Raises:
        ProjectionError: naming the site, the reason and the remedy.
    """
    parent = _parent(site, model)
    if reason := below(site.module):
        raise ProjectionError(f"the weight of {site.name} {reason}")
    if isinstance(site.module, nn.MultiheadAttention):
        projections = named.multihead(site)
        if parent is not None and is_adapted(parent):
            # The adapter around the module changes its weights during a call.
            for block in projections.blocks:
                block.beyond = obstacle(parent)
        return projections
    by_name = named.by_name(site, parent)
    if (parts := latent_blocks(site.module, site.name)) is not None:
        return _latent(site, parts, by_name.get("o"))
    reason = ""
    if {"q", "k", "v"} <= set(by_name):
        separate = named.separate(site, by_name)
        if isinstance(separate, Projections):
            return with_context(site, separate)
        reason = separate
    try:
        return probed(site, model, example, parent)
    except Unclear as unclear:
        raise ProjectionError(f"{site.name} {reason or unclear}") from None


def _latent(site: Site, parts: dict[str, Block], output: Leaf | None) -> Projections:
    """Return the projections of latent attention: parts of factors instead of q, k and v."""
    projections = Projections(site.name, "latent", latent=parts)
    makers_of = {kind: " and ".join(sorted({b.maker for k, b in parts.items() if kind in MAKES[k]})) for kind in "qkv"}
    projections.missing = {
        kind: f"is latent attention, which makes its {kind} by factors, {makers}" for kind, makers in makers_of.items()
    }
    named.add_output(projections, output, parts["up_v"].heads, parts["up_v"].head_dim, site)
    return projections


def of(site: Site) -> Projections:
    """Return the site's projections, found once and cached on the site.

    The model and the example are `site.model` and `site.example`, if the core has set them.

    Raises:
        ProjectionError: as `find`, or if the layer computes with a copy of these weights, which may be made later.
    """
    named.refuse_fused(site)
    # Not a field of the site: fields are what methods and `where` may read.
    projections = site.__dict__.get("found_projections")
    if projections is None:
        projections = find(site, getattr(site, "model", None), getattr(site, "example", None))
        site.__dict__["found_projections"] = projections
        _set_sizes(site, projections)
    _rebind(site, projections)
    return projections


def output(site: Site, who: str) -> Block:
    """Return the block of the output projection, found by its name if q, k and v are not plain matrices.

    Raises:
        ProjectionError: naming the site, the reason and the remedy, if it cannot be found.
    """
    reason = site.__dict__.get("output_alone", "")
    if not reason:
        try:
            return of(site).need("o", who, of="rows")[0]
        except ProjectionError as error:
            reason = str(error)
    leaf = named.by_name(site, _parent(site, site.model)).get("o")
    if leaf is None or leaf.transposed:
        raise ProjectionError(reason)
    alone = named.block("o", leaf, slice(0, leaf.columns), 1, leaf.columns, site)
    if unreadable := alone.unreadable():
        raise ProjectionError(f"{who} needs the output projection; {alone.where} {unreadable}")
    # Cached, so that the search for the other projections fails only once.
    site.__dict__["output_alone"] = reason
    return alone


def _rebind(site: Site, projections: Projections) -> None:
    """Bind blocks to the modules that now hold their parameters, after adapters were added or removed."""
    if site.model is None:
        return
    for block in projections.blocks:
        try:
            current = site.model.get_submodule(block.where.rpartition(".")[0])
        except AttributeError:
            continue
        if current is not block.module and base_of(current) is base_of(block.module):
            block.bind(current)


def _set_sizes(site: Site, projections: Projections) -> None:
    """Set the sizes on the site that it did not declare."""
    if projections.q is not None and projections.k is not None:
        site.heads = site.heads or projections.q.heads
        site.kv_heads = site.kv_heads or projections.k.heads
        site.head_dim = site.head_dim or projections.q.head_dim
        site.hidden = site.hidden or projections.q.width


def _parent(site: Site, model: nn.Module | None) -> nn.Module | None:
    if model is None or not site.name:
        return None
    try:
        return model.get_submodule(site.name.rpartition(".")[0])
    except AttributeError:
        return None
