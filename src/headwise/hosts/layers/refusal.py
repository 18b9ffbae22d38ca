"""Refusal: why a method has no meaning on a site."""

from __future__ import annotations

from headwise.attention.kept_kernel import edits
from headwise.core.method import Method
from headwise.core.site import Site
from headwise.hosts.layers import residual


def refusal(method: Method, site: Site) -> str | None:
    """Say why a method has no meaning on a site, or None where it has."""
    if site.kernel and not site.own_attention and (method.overrides("logits") or method.overrides("weights")):
        return edits(method, site.kernel)
    if method.self_only and site.is_cross:
        return "has no meaning on cross attention"
    if site.joint and (method.overrides("hidden") or method.overrides("branch")):
        return "acts on the tokens that enter or leave a layer, and here those of an image and of a text do so apart"
    if method.carries and site.windowed:
        return (
            "carries tokens between layers, and this layer attends in windows whose token order differs between layers"
        )
    if (method.self_only or method.carries) and site.pooled:
        return "needs queries and keys of the same tokens, and this layer pools one of them"
    return method.refuse(site) or (residual.obstacle(site) if method.overrides("branch") else None)
