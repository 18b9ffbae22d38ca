"""Joint: the projections of a text's tokens, which stand beside those of the image where both attend to each other
(Flux, SD3)."""

from __future__ import annotations

from torch import nn

from headwise.core.site import Site
from headwise.projections import named
from headwise.projections.block import ProjectionError
from headwise.projections.leaves import leaf
from headwise.projections.site_projections import Projections

# How diffusers names the projections of the tokens that are added, and the queries, keys and values that it joins into
# one matrix.
ADDED = {"q": "add_q_proj", "k": "add_k_proj", "v": "add_v_proj"}
OUTPUT, FUSED = "to_add_out", "fused_projections"


def with_context(site: Site, made: Projections) -> Projections:
    """Return the projections of a site with those of the text's tokens, where it has such.

    Raises:
        ProjectionError: where the layer computes with other weights than these.
    """
    module = site.module
    if getattr(module, FUSED, False) is True:
        raise ProjectionError(
            f"{site.name} computes with queries, keys and values that were joined into one copy of their weights: call "
            "unfuse_qkv_projections() on the model"
        )
    held = {kind: getattr(module, name, None) for kind, name in ADDED.items()}
    if not any(isinstance(part, nn.Module) for part in held.values()):
        return made
    found = {
        kind: leaf(f"{site.name}.{ADDED[kind]}", part) for kind, part in held.items() if isinstance(part, nn.Module)
    }
    parts = {kind: one for kind, one in found.items() if one is not None}
    if len(parts) < 3:
        raise ProjectionError(
            f"{site.name} adds keys and values of other tokens ({', '.join(one.name for one in parts.values())}) to a "
            "second attention, or "
            "without queries of theirs, so that its logits are made by more than its own query and key weights"
        )
    context = named.separate(site, parts)
    if isinstance(context, str):
        raise ProjectionError(f"{site.name} {context}")
    out = getattr(module, OUTPUT, None)
    if isinstance(out, nn.Module):
        named.add_output(
            context, leaf(f"{site.name}.{OUTPUT}", out), context.heads, context.need("v", of="rows")[0].head_dim, site
        )
    else:
        context.thrown_away = True
    made.context = context
    return made
