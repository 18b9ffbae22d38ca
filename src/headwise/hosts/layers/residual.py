"""Find the last dropout or norm before the residual, and the reasons why a method does not apply to a site."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from headwise import projections
from headwise.attention.computation import edits
from headwise.core.method import Method
from headwise.core.site import Site
from headwise.hosts.layers.branch_walk import BranchEnd, Walk, Way, drops, norms
from headwise.hosts.layers.declared import forward_of
from headwise.projections import ProjectionError


def last_before_sum(site: Site) -> nn.Module | None:
    """Return the last dropout or norm between a site's attention and the residual, or None if there is none.

    Raises:
        ProjectionError: if it is a function call or cannot be determined, so that no hook can be placed after it.
    """
    model, start = site.model, site.module
    if site.host != "torch":
        start = projections.output(site, "what acts on the branch").module
    name = next((n for n, m in model.named_modules() if m is start), "") if model is not None else ""
    if model is None:
        return None
    way = Way()
    try:
        # From the inside out: a result that a module returns unchanged may meet a dropout or norm in its parent.
        while name:
            name, way = _climb(model, name, way)
        raise way.lost()
    except BranchEnd as end:
        if end.barred:
            raise ProjectionError(end.barred) from None
        return end.module


def obstacle(site: Site) -> str | None:
    """Return why no method can act on a site's branch where it enters the residual, or None if one can."""
    try:
        last_before_sum(site)
    except ProjectionError as error:
        return str(error)
    return None


def _climb(model: nn.Module, name: str, way: Way) -> tuple[str, Way]:
    """Follow the result of a module through its parent; return the parent's name and the way up to its result."""
    above, _, own = name.rpartition(".")
    parent = model.get_submodule(above)
    if not isinstance(parent, nn.Sequential | nn.ModuleList):
        back = Walk(parent, own, way).through(forward_of(parent))
        # A result that is not seen to be returned may be returned in a way that cannot be read.
        return above, replace(way, moved=True) if back is None else back
    # Neither has code to read. A Sequential runs its children in order. A ModuleList of a projection and its dropout
    # (diffusers' to_out) is run in order too, but what follows the list is in the code of the module that keeps it.
    later = list(parent._modules.values())[list(parent._modules).index(own) + 1 :]
    for module in later:
        if drops(module):
            way = replace(way, last=module, barred="")
        elif norms(module) and isinstance(parent, nn.Sequential):
            way = way.through_norm(module, type(parent).__name__)
        elif not isinstance(module, nn.Identity):
            if isinstance(parent, nn.Sequential):
                raise way.lost()
            break
    return above, way


def refusal(method: Method, site: Site) -> str | None:
    """Return why a method does not apply to a site, or None if it does."""
    if site.kernel and not site.own_attention and (method.overrides("logits") or method.overrides("weights")):
        return edits(method, site.kernel)
    if method.self_only and site.is_cross:
        return "has no meaning on cross attention"
    if site.joint and (method.overrides("hidden") or method.overrides("branch")):
        return "acts on the tokens that enter or leave a layer, and here image and text tokens do so separately"
    if method.carries and site.windowed:
        return (
            "carries tokens between layers, and this layer attends in windows whose token order differs between layers"
        )
    if (method.self_only or method.carries) and site.pooled:
        return "needs queries and keys of the same tokens, and this layer pools one of the two"
    return method.refuse(site) or (obstacle(site) if method.overrides("branch") else None)
