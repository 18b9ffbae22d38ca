"""Why a method does not apply to a site: the core's rules, then the method's own `refuse`."""

from __future__ import annotations

from headwise.attend.attention.computation import edits
from headwise.attend.core import Method, Site
from headwise.attend.hosts.layers.branch_walk import obstacle


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
