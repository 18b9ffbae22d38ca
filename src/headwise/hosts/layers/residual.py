"""Residual: behind which dropout a layer's branch enters the residual."""

from __future__ import annotations

from torch import nn

from headwise import projections
from headwise.core.remedies import LEAVE_OUT
from headwise.core.site import Site
from headwise.hosts.layers.branch_walk import BranchEnd, Walk, drops
from headwise.hosts.layers.code import forward_of
from headwise.projections import ProjectionError


def projection_dropout(site: Site) -> nn.Module | None:
    """Give the dropout module between a site's output projection and the residual, or None where there is none.

    Raises:
        ProjectionError: where it is a function call with p above 0, or cannot be seen: nothing can stand behind it.
    """
    model, start = site.model, site.module
    if site.host != "torch":
        start = projections.of(site).need("o", "what acts on the branch", of="rows")[0].module
    name = next((n for n, m in model.named_modules() if m is start), "") if model is not None else ""
    if model is None:
        return None
    try:
        # Outwards, module by module: what is given back unchanged meets its dropout in the module around.
        while name:
            name = _climb(model, name)
    except BranchEnd as end:
        if end.module is None and end.p != 0:
            told = "of a p that cannot be told" if end.p is None else f"with p={end.p:g}"
            raise ProjectionError(
                f"drops the attention branch by a function call {told} in {end.where}, behind which nothing can stand: set that "
                f"dropout to 0, or {LEAVE_OUT}"
            ) from None
        return end.module
    return None


def obstacle(site: Site) -> str | None:
    """Say why nothing can act on a site's branch where it enters the residual, or None where it can."""
    try:
        projection_dropout(site)
    except ProjectionError as error:
        return str(error)
    return None


def _climb(model: nn.Module, name: str) -> str:
    """Follow the result of a module through the module around it; give that one's name where the result leaves it."""
    above, _, own = name.rpartition(".")
    parent = model.get_submodule(above)
    if isinstance(parent, nn.Sequential | nn.ModuleList):
        # Neither has code of its own to read. A Sequential runs its children in order; so do those who keep a list of a
        # projection and its dropout (diffusers' to_out), but what they do behind the list stands in their own code.
        later = list(parent._modules.values())[list(parent._modules).index(own) + 1 :]
        for module in later:
            if drops(module):
                raise BranchEnd(module)
            if not isinstance(module, nn.Identity):
                if isinstance(parent, nn.Sequential):
                    raise BranchEnd
                break
        return above
    Walk(parent, own).through(forward_of(parent))
    return above
